"""When a rank's stages compute, step by step."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autoshard.reporting.marks import Marks
from autoshard.runtime.stage_clock import StepPart
from passes.stages.pipeline_orders import Action

__all__ = ["RankStep", "StageRecorder"]


@dataclass(frozen=True)
class RankStep:
    """A rank's step. begins: seconds since the recorder's start. parts: seconds from there to the first piece, to the
    end of the pieces, and to the end. actions: what was computed, from when to when."""

    begins: float
    pieces: float
    end: float
    done: float
    actions: tuple[tuple[Action, float, float], ...]

    @property
    def busy(self) -> float:
        """Seconds that it computed."""
        return self.pieces + (self.done - self.end) + sum(end - start for _, start, end in self.actions)


@dataclass
class _Marked:
    begins: float
    parts: dict[str, Any] = field(default_factory=dict)
    actions: list[tuple[Action, Any, Any]] = field(default_factory=list)


class StageRecorder:
    """A `StageClock`. start: all ranks call it together, behind a barrier."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._start = 0.0
        self._steps: list[_Marked] = []

    def start(self) -> None:
        self._start = time.perf_counter()

    def begins(self, part: StepPart) -> None:
        if part == "begin":
            self._steps.append(_Marked(time.perf_counter() - self._start))
        self._steps[-1].parts[part] = self._marks.mark()

    @contextmanager
    def action(self, action: Action) -> Generator[None]:
        start = self._marks.mark()
        yield
        self._steps[-1].actions.append((action, start, self._marks.mark()))

    def steps(self) -> list[RankStep]:
        """Those that trained, complete."""
        whole = [step for step in self._steps if "done" in step.parts]
        return [self._seconds(s) for s in whole if any(a.kind != "forward" for a, _, _ in s.actions)]

    def _seconds(self, step: _Marked) -> RankStep:
        after = lambda mark: self._marks.seconds(step.parts["begin"], mark)
        parts = step.parts
        return RankStep(
            step.begins,
            after(parts["pieces"]),
            after(parts["end"]),
            after(parts["done"]),
            tuple((action, after(start), after(end)) for action, start, end in step.actions),
        )
