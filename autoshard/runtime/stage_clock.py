"""Who is told when a rank's stages compute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, Protocol

from passes.stages.pipeline_orders import Action

__all__ = ["StageClock", "StepPart", "timed"]

StepPart = Literal["begin", "pieces", "end", "done"]
"""What begins: a step, its first piece, what runs after the pieces; and the end of the step."""


class StageClock(Protocol):
    def begins(self, part: StepPart) -> None: ...

    def action(self, action: Action) -> AbstractContextManager[Any]:
        """The block in which it is computed, without what is sent and waited for."""
        ...


def timed(clocks: Sequence[StageClock], action: Action) -> AbstractContextManager[Any]:
    if not clocks:
        return nullcontext()
    stack = ExitStack()
    for clock in clocks:
        stack.enter_context(clock.action(action))
    return stack
