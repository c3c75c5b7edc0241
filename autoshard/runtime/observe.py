"""Who watches a program run. A program without observers pays for one look at an empty list."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from torch import Tensor

from cost_model.measure.clock import Marks
from passes.lower.phases import Phases
from passes.lower.rank_program import RankProgram
from passes.stages.pipeline_orders import Action


@dataclass(frozen=True, eq=False)
class InPieces:
    """A batch that is run in pieces. made: its programs. leaves, tangents: names of the placeholders whose values a
    step is given; of tangents by index of the output."""

    made: Callable[[], tuple[RankProgram, ...]]
    leaves: tuple[str, ...]
    tangents: Mapping[int, str]

    @cached_property
    def programs(self) -> tuple[RankProgram, ...]:
        """Of every piece, in their order."""
        return self.made()

    @property
    def given(self) -> tuple[str, ...]:
        return (*self.leaves, *self.tangents.values())


@dataclass(frozen=True)
class PhaseRun:
    """One run of a program's forward or backward, or of a piece's.

    phases:  its graphs in the order in which they run; of a backward with the graph that runs for the tangents of this
             call. Of a batch in pieces it is the same object in all its runs.
    inputs:  of a forward, this rank's tensors, parallel to `phases.inputs` or `phases.given`. Not those of a
             backward: its program frees them as it goes.
    last:    no piece of the batch comes after.
    """

    phase: Literal["forward", "backward"]
    phases: Phases | InPieces
    inputs: tuple[Tensor, ...] = ()
    last: bool = True

    @property
    def forward(self) -> object:
        """The same object for a forward and its backward."""
        return self.phases.forward if isinstance(self.phases, Phases) else self.phases


class Observer(Protocol):
    def begin(self, run: PhaseRun) -> None: ...

    def end(self, run: PhaseRun) -> None: ...


def observed(observers: Sequence[Observer], run: Callable[[], PhaseRun]) -> AbstractContextManager[None]:
    """Tell the observers, if there are any, when the block begins and when it is over."""
    return _told(observers, run()) if observers else nullcontext()


@contextmanager
def unobserved(*watching: list[Any]) -> Generator[None]:
    """Nobody in these lists is told of what runs in the block."""
    kept = [observers[:] for observers in watching]
    for observers in watching:
        observers.clear()
    try:
        yield
    finally:
        for observers, before in zip(watching, kept, strict=True):
            observers[:] = before


@contextmanager
def _told(observers: Sequence[Observer], run: PhaseRun) -> Generator[None]:
    for observer in observers:
        observer.begin(run)
    yield
    for observer in observers:
        observer.end(run)


StepPart = Literal["begin", "pieces", "end", "done"]
"""Begins of a step, of its first piece, and of what runs after the pieces; and the end of the step."""


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
    def trained(self) -> bool:
        return any(action.kind != "forward" for action, _, _ in self.actions)

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
    """Of a rank's stages. start: all ranks call it together, behind a barrier."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._start = 0.0
        self._steps: list[_Marked] = []

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self) -> None: ...

    def begins(self, part: StepPart) -> None:
        if part == "begin":
            self._steps.append(_Marked(time.perf_counter() - self._start))
        self._steps[-1].parts[part] = self._marks.mark()

    @contextmanager
    def action(self, action: Action) -> Generator[None]:
        """The block in which it is computed, without what is sent and waited for."""
        start = self._marks.mark()
        yield
        self._steps[-1].actions.append((action, start, self._marks.mark()))

    def steps(self) -> list[RankStep]:
        """Those that are complete."""
        return [self._seconds(step) for step in self._steps if "done" in step.parts]

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


def timed(clocks: Sequence[StageRecorder], action: Action) -> AbstractContextManager[Any]:
    if not clocks:
        return nullcontext()
    stack = ExitStack()
    for clock in clocks:
        stack.enter_context(clock.action(action))
    return stack
