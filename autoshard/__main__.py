"""`python -m autoshard` is the `autoshard` command."""

import sys

from autoshard.cli import main

sys.exit(main())
