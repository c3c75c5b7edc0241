"""docs/trace.md is what the code gives."""

from __future__ import annotations

import pytest

from tests.golden import Golden
from tests.structure.source_tree import ROOT
from tests.structure.trace import trace


def test_the_page_is_what_the_code_gives(request: pytest.FixtureRequest) -> None:
    Golden(ROOT / "docs", bool(request.config.getoption("--update-golden"))).check(trace(), "trace.md")
