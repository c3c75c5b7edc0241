"""What is alive at every step of a rank's program, as it is known when the program was walked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from cost_model.checked_arguments import Count, Text
from passes.predict.memory_kinds import KINDS, Kind

START = ("forward", "start")
"""The step before the first op."""


@dataclass(frozen=True, slots=True)
class LiveValue:
    """A tensor of a rank's program, alive from step `first` to step `last`, both included.

    name: of the parameter or input, or of the module whose op makes it; op: that op, "" of what is given. node: in the
    graph. dtype, shape: of this rank's part.
    """

    kind: Kind
    name: str
    op: str
    node: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    first: int
    last: int


class MemoryStep(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes alive while `node` runs, step number `place` of the program. by_kind: parallel to `KINDS`."""

    place: Count
    phase: Annotated[str, Meta(pattern="^(forward|backward|input|weight)$")]
    node: Text
    by_kind: Annotated[tuple[Count, ...], Meta(min_length=len(KINDS), max_length=len(KINDS))]

    @property
    def nbytes(self) -> int:
        return sum(self.by_kind)

    def of(self, kind: Kind) -> int:
        return self.by_kind[KINDS.index(kind)]


@dataclass(frozen=True, eq=False)
class MemoryWalk:
    """steps: (phase, node) in the order in which they run, the first before any op. values: all that is ever alive."""

    steps: tuple[tuple[str, str], ...]
    values: tuple[LiveValue, ...]

    @cached_property
    def by_kind(self) -> NDArray[np.int64]:
        """Bytes [steps, kinds]."""
        changes = np.zeros((len(self.steps) + 1, len(KINDS)), dtype=np.int64)
        for value in self.values:
            column = KINDS.index(value.kind)
            changes[value.first, column] += value.nbytes
            changes[value.last + 1, column] -= value.nbytes
        return np.cumsum(changes, axis=0)[:-1]

    @cached_property
    def peak(self) -> MemoryStep:
        """The first step with the most bytes."""
        return self.step(int(np.argmax(self.by_kind.sum(axis=1))))

    def held(self) -> list[tuple[str, int]]:
        """(node, bytes) of every step."""
        totals = self.by_kind.sum(axis=1).tolist()
        return [(node, nbytes) for (_, node), nbytes in zip(self.steps, totals, strict=True)]

    def step(self, place: int) -> MemoryStep:
        return MemoryStep(place, *self.steps[place], tuple(int(nbytes) for nbytes in self.by_kind[place]))

    def alive(self, place: int) -> list[LiveValue]:
        """What has bytes at that step."""
        return [value for value in self.values if value.first <= place <= value.last and value.nbytes]

    def peak_of(self, phase: str) -> int:
        """The most bytes of a phase."""
        inside = [place for place, (name, _) in enumerate(self.steps) if name == phase]
        return int(self.by_kind[inside].sum(axis=1).max(initial=0))
