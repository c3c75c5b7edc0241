"""Which seconds of a step may run side by side: kinds of computing and communication, and the paths through them.

A phase's ops run one after the other, and so do its collectives; the two streams run side by side. Collectives are of
three roles (`passes.schedule.transfer_roles`): what is at hand (gathered before its reader), what only the end needs
(reduced after its producer), and what is waited for. Ops are of two: those that a product comes after, and *fillers*,
such as the product that makes a weight's gradient, behind which the backward's awaited collectives can hide.

A phase is cut at `MARKS` of its computing. Whatever the order of its collectives, it takes at least, for every i < j,

    communication at hand or awaited, read before mark i
    + computing between the marks: all of it, or all but fillers and with it what is awaited
    + communication awaited or for the end only, of values made after mark j

that is the bound of a two-machine flow shop [Johnson 1954] for a graph whose ends have nothing to hide behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from torch import fx

from passes.ir.joint import JointGraph, result_index, segments, tensor_operands
from passes.ir.op_traits import is_piece, is_product
from passes.plan.planned_graph import NodeRecord
from passes.schedule.transfer_roles import HiddenReads
from passes.solver.problem import Array

EXPOSED = -1
"""The kind of what nothing hides: the last column."""
MARKS = (0.0, 0.02, 0.1, 0.9, 0.98)
"""Shares of a phase's computing at which it is cut. Gathers before its first op and reductions after its last have
nothing to hide behind, the bulk has everything; in between twice a factor of about five."""
_SEGMENTS = len(MARKS) + 1
_ROLES = ("chain", "filler", "at hand", "ending", "awaited")
_PHASE = _SEGMENTS * len(_ROLES)
KINDS = 2 * _PHASE + 1
"""Of two phases, and `EXPOSED`."""

CLOSE, EXPLAINED = 1e-3, 0.99
"""Share of a phase by which it may be off as it is, and of what is missing that may stay so for a share that hides to
be taken for the cause. Nothing is learned of what a plan does not have: what is left is a constant."""

Read = tuple[str, int]


@dataclass(frozen=True)
class PhaseOverlap:
    """How well a phase overlaps. efficiency: of two streams busy at once, the share of the shorter that costs no
    time, in [0, 1]. awaited: the share of what is awaited that may hide behind fillers. extra: seconds that the phase
    takes besides."""

    efficiency: float
    awaited: float = 0.0
    extra: float = 0.0

    def hides_as(self, other: PhaseOverlap) -> bool:
        """Whether the same plan is the fastest under both: they differ by a constant."""
        return (self.efficiency, self.awaited) == (other.efficiency, other.awaited)


@dataclass(frozen=True)
class StepKinds:
    """nodes: op -> kind; reads: (reader, position among its tensor operands) -> kind; others are EXPOSED."""

    nodes: Mapping[str, int]
    reads: Mapping[Read, int]

    def totals(self, records: Iterable[NodeRecord]) -> Array:
        """Seconds by kind of a planned step, from the records of its plan."""
        totals = np.zeros(KINDS)
        for record in records:
            totals[self.nodes.get(record.name, EXPOSED)] += record.seconds
            for position, operand in enumerate(record.operands):
                kind = self.reads.get((record.name, position), EXPOSED)
                totals[kind] += sum(transfer.seconds for transfer in operand.transfers)
        return totals


def phase_paths(overlaps: Sequence[PhaseOverlap]) -> tuple[Array, ...]:
    """Per phase float64[paths, kinds]: what each path holds of the phase's seconds less all of them, times the
    efficiency.

    The seconds of a phase are those of all its kinds and the largest of `paths @ totals`, which is what hides,
    negative. The first path is the one of all computing.
    """
    return tuple(_paths(phase, overlap) for phase, overlap in enumerate(overlaps))


def phase_seconds(totals: Array, overlaps: Sequence[PhaseOverlap]) -> list[float]:
    """Of each phase, by its longest path."""
    return [_seconds(totals, phase, overlap) for phase, overlap in enumerate(overlaps)]


def corrected(
    totals: Array, overlaps: Sequence[PhaseOverlap], seconds: Sequence[float]
) -> tuple[PhaseOverlap, ...]:
    """`overlaps` under which a step of these totals takes `seconds` per phase: by the share of what is awaited that
    hides, then by the efficiency, both in [0, 1], and what is left is `extra`."""
    pairs = zip(overlaps, seconds, strict=True)
    return tuple(_corrected(totals, phase, overlap, wanted) for phase, (overlap, wanted) in enumerate(pairs))


def step_kinds(joint: JointGraph, hidden: HiddenReads, seconds: Mapping[str, float]) -> StepKinds:
    """Kinds of the ops and reads of `joint`. seconds: about what each op computes, by name: where the marks are."""
    parts = segments(joint)
    phases = parts.forward, parts.backward
    nodes: dict[str, int] = {}
    places: dict[str, tuple[int, int, int]] = {}  # op -> phase, segment of its begin, segment of its end
    for phase, ops in enumerate(phases):
        fillers = _fillers(ops) if phase else frozenset[fx.Node]()
        total = sum(seconds.get(op.name, 0.0) for op in ops) or 1.0
        done = 0.0
        for op in ops:
            begin, done = done, done + seconds.get(op.name, 0.0)
            places[op.name] = phase, bisect_left(MARKS, begin / total), bisect_left(MARKS, done / total)
            nodes[op.name] = _kind(phase, "filler" if op in fillers else "chain", places[op.name][2])
    return StepKinds(nodes, _reads(joint, hidden, places))


def _kind(phase: int, role: str, segment: int) -> int:
    return phase * _PHASE + _ROLES.index(role) * _SEGMENTS + segment


def ended_phase(kind: int) -> int | None:
    """The phase that communication of this kind is for the end of; None: of another kind."""
    role = kind % _PHASE // _SEGMENTS
    return kind // _PHASE if kind != EXPOSED and _ROLES[role] == "ending" else None


def ended_seconds(totals: Array, phase: int) -> float:
    """Of these seconds by kind, those of communication that is for the end of the phase."""
    first = _kind(phase, "ending", 0)
    return float(totals[first : first + _SEGMENTS].sum())


def _reads(
    joint: JointGraph, hidden: HiddenReads, places: Mapping[str, tuple[int, int, int]]
) -> dict[Read, int]:
    found: dict[Read, int] = {}
    for node in joint.graph.nodes:
        if node.name in places and result_index(node)[0] is node and not is_piece(node):
            for position, operand in enumerate(tensor_operands(node)):
                read = node.name, position
                phase, begin, _ = places[node.name]
                if read not in hidden.hides:
                    found[read] = _kind(phase, "awaited", begin)
                elif read in hidden.ending:
                    found[read] = _kind(phase, "ending", _made(operand, places, begin))
                else:
                    found[read] = _kind(phase, "at hand", begin)
    ends = [result for result in joint.results if result is not None]
    for place, end in enumerate(ends):
        made = places.get(result_index(end)[0].name)
        if ("output", place) in hidden.hides and made is not None:
            found["output", place] = _kind(made[0], "ending", made[2])
    return found


def _made(operand: fx.Node, places: Mapping[str, tuple[int, int, int]], otherwise: int) -> int:
    made = places.get(result_index(operand)[0].name)
    return otherwise if made is None else made[2]


def _fillers(ops: list[fx.Node]) -> frozenset[fx.Node]:
    """Ops that no product comes after."""
    followed: set[fx.Node] = set()
    for node in reversed(ops):
        if any(is_product(user) or user in followed for user in node.users):
            followed.add(node)
    return frozenset(ops) - followed


def _seconds(totals: Array, phase: int, overlap: PhaseOverlap) -> float:
    rows, hidden = _rows(phase)
    longest = float((rows @ totals + (1.0 - overlap.awaited) * (hidden @ totals)).max())
    return float(totals[_phase(phase)].sum()) + overlap.efficiency * longest + overlap.extra


def _corrected(totals: Array, phase: int, overlap: PhaseOverlap, wanted: float) -> PhaseOverlap:
    best, taken = replace(overlap, extra=0.0), partial(_seconds, totals, phase)
    for share in ("awaited", "efficiency") if phase else ("efficiency",):
        missing = abs(wanted - taken(best))
        if missing <= CLOSE * wanted:
            break
        hiding = partial(_hiding, best, share)
        other = hiding(_root(lambda s, hiding=hiding: taken(hiding(s)), wanted))
        if abs(wanted - taken(other)) <= EXPLAINED * missing:
            best = other
    return replace(best, extra=wanted - taken(best))


def _hiding(overlap: PhaseOverlap, share: str, value: float) -> PhaseOverlap:
    return replace(overlap, **{share: value})


def _root(falling: Callable[[float], float], wanted: float) -> float:
    """Where in [0, 1] a function that never rises comes nearest to `wanted`."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return round(high, 9)


def _phase(phase: int) -> slice:
    return slice(phase * _PHASE, (phase + 1) * _PHASE)


def _paths(phase: int, overlap: PhaseOverlap) -> Array:
    rows, hidden = _rows(phase)
    found = rows + (1.0 - overlap.awaited) * hidden
    once = {row.tobytes(): row for row in found}
    return overlap.efficiency * np.array(list(once.values()))


@cache
def _rows(phase: int) -> tuple[Array, Array]:
    """What each path holds of the phase's seconds, but for what is awaited and may hide, less all of them; and that.

    Both float64[paths, kinds]. Some paths are the same where all of that hides, or nothing.
    """
    spans = [(0, _SEGMENTS)]
    spans += [
        (i, j) for i in range(_SEGMENTS + 1) for j in range(i, _SEGMENTS + 1) if (i, j) != (0, _SEGMENTS)
    ]
    rows: list[Array] = []
    hidden: list[Array] = []
    for first, last in spans:
        for role in ("filler", "awaited"):
            row, may_hide = np.zeros(KINDS), np.zeros(KINDS)
            _mark(row, phase, ("at hand", "awaited"), range(first))
            _mark(row, phase, ("chain", role), range(first, last))
            if role == "filler":
                _mark(may_hide, phase, ("awaited",), range(first, last))
            _mark(row, phase, ("ending", "awaited"), range(last, _SEGMENTS))
            rows.append(row)
            hidden.append(may_hide)
    everything, every = np.zeros(KINDS), np.zeros(KINDS)
    _mark(everything, phase, ("at hand", "ending", "awaited"), range(_SEGMENTS))
    every[_phase(phase)] = 1.0
    return np.array([*rows, everything]) - every, np.array([*hidden, np.zeros(KINDS)])


def _mark(row: Array, phase: int, roles: tuple[str, ...], segments: range) -> None:
    for role in roles:
        for segment in segments:
            row[_kind(phase, role, segment)] = 1.0
