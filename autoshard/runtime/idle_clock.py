"""How long a rank's stages waited in a step."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from autoshard.runtime.stage_clock import StepPart
from passes.stages.pipeline_orders import Action

__all__ = ["IdleClock"]


class IdleClock:
    """A `StageClock` of stages whose work is done when its call returns. idle: seconds of the last step between its
    first piece and its last in which this rank computed nothing; None where there are no stages."""

    def __init__(self) -> None:
        self.idle: float | None = None
        self._begun = self._busy = 0.0

    def begins(self, part: StepPart) -> None:
        now = time.perf_counter()
        if part == "pieces":
            self._begun, self._busy = now, 0.0
        elif part == "end":
            self.idle = now - self._begun - self._busy

    @contextmanager
    def action(self, action: Action) -> Generator[None]:
        start = time.perf_counter()
        yield
        self._busy += time.perf_counter() - start
