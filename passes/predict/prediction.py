"""What is predicted of one rank's step: how long it takes and what its memory holds."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import fx

from cost_model.errors import Count, Seconds, Text, Word
from passes.ir.op_traits import is_collective, is_view, op_name
from passes.predict.step_events import COLLECTIVE_KINDS, PredictedCollective
from passes.states.compute_again import runs_again

Kind = Literal["parameters", "gradients", "optimizer", "inputs", "kept", "again", "moved", "working"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""parameters; their gradients, as they are returned; the optimizer's states; inputs: of the call, buffers, constants
and the gradient of the loss; kept: what the forward saves for the backward; again: what the backward computes once
more; moved: what transfers send and receive, in buckets or not (gathers, reductions), to its last reader; working: all
else that a phase makes and still reads."""


def kind_of_op(node: fx.Node, forward: Set[str]) -> Kind:
    """Of what `node` makes, if it is neither kept nor a gradient. forward: names of the forward's ops, for an op of the
    backward: it has those that it computes again under their names."""
    if is_collective(node) or "turn" in node.meta or _only_sent(node):
        return "moved"
    return "again" if runs_again(node) or node.name in forward else "working"


def _only_sent(node: fx.Node) -> bool:
    """Whether collectives alone read the value."""
    readers = list(node.users)
    return bool(readers) and all(
        is_collective(reader) or (is_view(reader) and _only_sent(reader)) for reader in readers
    )


def made_by(node: fx.Node) -> tuple[str, str]:
    """(name, op): whose value an op makes, a module's or a transfer's, and what it does."""
    name = str(node.meta.get("serves") or node.meta.get("module") or "")
    op = (is_collective(node) and COLLECTIVE_KINDS.get(node.target)) or op_name(node).rpartition(".")[0]
    return name, op.removeprefix("aten.").removeprefix("autoshard.")


Phase = Literal["forward", "backward", "optimizer"]

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


class Kernel(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """node: in the phase's graph; of: in the planned graph, "" of none. start, end: seconds into its part."""

    phase: Phase
    node: Text
    of: Text
    start: Seconds
    end: Seconds


class Moved(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A collective, as `PredictedCollective`; start, end: seconds into its part."""

    phase: Phase
    serves: Text
    kind: Word
    axes: tuple[Word, ...]
    nbytes: Count
    start: Seconds
    end: Seconds
    exposed: Seconds
    turn: tuple[int, ...] | None

    @staticmethod
    def of(one: PredictedCollective) -> Moved:
        what = one.phase, one.serves, one.kind, one.axes, one.nbytes
        return Moved(*what, one.start, one.end, one.exposed, one.turn)  # type: ignore[arg-type]


class TimelinePart(Struct, frozen=True, forbid_unknown_fields=True):
    """What runs so many times, one after the other, each `seconds` long: a step, or of one in pieces what is before
    them, a piece, what is after them, and the update."""

    times: Annotated[int, Meta(ge=1, le=1_000_000)]
    seconds: Seconds
    kernels: tuple[Kernel, ...]
    moved: tuple[Moved, ...]

    def without(self, phase: str) -> TimelinePart:
        return replace(self, kernels=tuple(kernel for kernel in self.kernels if kernel.phase != phase))

    def in_phase(self, phase: Phase) -> TimelinePart:
        """All of it said to be of that phase."""
        of = lambda ones: tuple(replace(one, phase=phase) for one in ones)
        return replace(self, kernels=of(self.kernels), moved=of(self.moved))

    def scaled(self, factor: float) -> TimelinePart:
        """All of it so many times as long."""
        longer = lambda one, *names: replace(one, **{name: factor * getattr(one, name) for name in names})
        kernels = tuple(longer(kernel, "start", "end") for kernel in self.kernels)
        moved = tuple(longer(one, "start", "end", "exposed") for one in self.moved)
        return TimelinePart(self.times, factor * self.seconds, kernels, moved)


@dataclass(frozen=True)
class PredictedPhase:
    """seconds: from its begin to its end. compute: its kernels at full speed; communication: its
    collectives, each alone; exposed: what they add to the kernels' time."""

    name: str
    seconds: float
    compute: float
    communication: float
    exposed: float


@dataclass(frozen=True)
class Prediction:
    """One rank's step. phases: forward, backward if there is one, optimizer if something is trained. memory: what is
    alive when (`passes.predict.memory_walk`), of `predicted_step` on the fullest rank. timeline: what runs when."""

    seconds: float
    phases: tuple[PredictedPhase, ...]
    collectives: tuple[PredictedCollective, ...]
    memory: MemoryWalk | None = None
    timeline: tuple[TimelinePart, ...] = ()

    @property
    def peak(self) -> MemoryStep:
        """Where most bytes are alive."""
        assert self.memory is not None
        return self.memory.peak

    @property
    def compute(self) -> float:
        """Seconds of all kernels at full speed, the optimizer's included."""
        return sum(phase.compute for phase in self.phases)

    @property
    def phase_seconds(self) -> tuple[float, float, float]:
        """Of the forward, the backward and the update, 0 for a phase that there is not."""
        seconds = {phase.name: phase.seconds for phase in self.phases}
        return seconds["forward"], seconds.get("backward", 0.0), seconds.get("optimizer", 0.0)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to `compute`."""
        return sum(phase.exposed for phase in self.phases)
