"""How long a rank's stages computed in a step."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from autoshard.runtime.observe import StepPart
from passes.stages.pipeline_orders import Action

__all__ = ["BusyClock"]


class BusyClock:
    """A `StageClock` of stages whose work is done when its call returns. busy: seconds that this rank computed in the
    last step, of pieces, and once before and after them; None where there are no stages."""

    def __init__(self) -> None:
        self.busy: float | None = None
        self._at: dict[StepPart, float] = {}
        self._computed = 0.0

    def begins(self, part: StepPart) -> None:
        self._at[part] = time.perf_counter()
        if part == "begin":
            self._computed = 0.0
        elif part == "done":
            at = self._at
            self.busy = at["pieces"] - at["begin"] + self._computed + at["done"] - at["end"]

    @contextmanager
    def action(self, action: Action) -> Generator[None]:
        start = time.perf_counter()
        yield
        self._computed += time.perf_counter() - start
