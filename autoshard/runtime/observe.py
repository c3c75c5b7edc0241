"""Who watches a program run. A program without observers pays for one look at an empty list."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from passes.lower.phases import Phases
from passes.lower.rank_program import RankProgram

__all__ = ["InPieces", "Observer", "PhaseRun", "observed", "unobserved"]


@dataclass(frozen=True, eq=False)
class InPieces:
    """A batch that is run in pieces. programs: of every piece, in their order. leaves: names of the placeholders whose
    values a step is given."""

    programs: tuple[RankProgram, ...]
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class PhaseRun:
    """One run of a program's forward or backward, or of a piece's.

    phases:  its graphs in the order in which they run; of a backward with the graph that runs for the tangents of this
             call. Of a batch in pieces it is the same object in all its runs.
    inputs:  of a forward, this rank's tensors, parallel to `phases.inputs` or `phases.leaves`. Not those of a
             backward: its program frees them as it goes.
    last:    no piece of the batch comes after.
    """

    phase: Literal["forward", "backward"]
    phases: Phases | InPieces
    inputs: tuple[Tensor, ...] = ()
    last: bool = True

    @property
    def forward(self) -> object:
        """What a forward and its backward have in common."""
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
