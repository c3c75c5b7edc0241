"""The programs of one kind of call: op by op while it is new, compiled when it has come again."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.runtime.piecewise_step import PiecewiseProgram
from autoshard.runtime.pipeline_program import PipelineProgram
from autoshard.runtime.step import Program

__all__ = ["AnyProgram", "Programs"]

AnyProgram = Program | PiecewiseProgram | PipelineProgram

_OP_BY_OP = 2
"""Calls before a later kind of call is compiled: a last, smaller batch comes once an epoch, and compiling it takes
longer than running it. Counted by calls, so that all ranks compile at the same one."""


class Programs:
    """made: compiles by a backend, on all ranks together. at_once: the first kind of call is what the run is about."""

    def __init__(self, made: Callable[[str], AnyProgram], backend: str, *, at_once: bool) -> None:
        self._made, self._backend = made, backend
        self._calls = 0
        self._compiled = at_once or backend == "eager"
        self._program = made(backend if at_once else "eager")

    def next(self) -> AnyProgram:
        """For one more call. A step that has begun with another program ends with that one."""
        self._calls += 1
        if not self._compiled and self._calls > _OP_BY_OP:
            self._program = self._made(self._backend)
            self._compiled = True
        return self._program
