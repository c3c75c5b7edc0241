"""HiGHS in a thread of its own, so that Ctrl-C, or a failure of another rank, ends a search within a solve."""

from __future__ import annotations

from typing import Any

__all__ = ["run_solver"]

_LEFT_SECONDS = 5.0


def run_solver(solver: Any) -> None:
    """`solver.run()`; what is raised in this thread meanwhile stops it. Inside `run` no signal's handler would run."""
    solver.HandleUserInterrupt = True
    thread = solver.startSolve()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except BaseException:
        solver.cancelSolve()
        thread.join(_LEFT_SECONDS)
        raise
