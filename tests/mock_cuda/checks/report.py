"""What a check prints of each of its cases, and its exit status."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["PREFIX", "Report"]

PREFIX = "case:"  # `case: passed|FAILED <seconds> <name>`: tests/mock_cuda/run.py reads these lines


class Report:
    """Cases of one process. A case that raises has failed, and the next one runs."""

    def __init__(self) -> None:
        self._failed = 0

    @contextmanager
    def case(self, name: str) -> Generator[None]:
        start, outcome = time.perf_counter(), "passed"
        try:
            yield
        except Exception:
            outcome = "FAILED"
            self._failed += 1
            traceback.print_exc()
        sys.stderr.flush()
        print(f"{PREFIX} {outcome} {time.perf_counter() - start:.1f} {name}", flush=True)

    def exit(self) -> None:
        sys.exit(1 if self._failed else 0)
