"""Which seconds of a step may run side by side: kinds of computing and communication; and how long a phase takes at
least whose seconds are of known kinds: the longest of the paths through it.

A phase's ops run one after the other, and so do its collectives over one link; computing and the links run side by
side. Collectives are of three roles (`passes.plan.transfers`): what is at hand (gathered before its reader),
what only the end needs (reduced after its producer), and what is waited for. Ops are of two: those that a product comes
after, and *fillers*, such as the product that makes a weight's gradient, behind which the backward's awaited
collectives can hide. A phase is cut at `MARKS` of its computing.

Whatever the order of its collectives, a phase takes at least, for every i < j,

    communication at hand or awaited, read before mark i, over any one link
    + computing between the marks: all of it, or all but fillers and with it what is awaited
    + communication awaited or for the end only, of values made after mark j, over any one link

that is the bound of a two-machine flow shop [Johnson 1954] for a graph whose ends have nothing to hide behind. Of
streams that slow each other down only a share hides: then it takes that share of the longest path and the rest of all
seconds (`cost_model.timeline`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np
from torch import fx

from passes.ir.joint import JointGraph, result_index, segments, tensor_operands
from passes.ir.op_traits import is_piece, is_product
from passes.plan.planned_graph import NodeRecord
from passes.plan.transfers import HiddenReads
from passes.redistribution.redistribute import Redistributor
from passes.solver.problem import Array

EXPOSED = -1
"""The kind of what nothing hides: the last column."""
MARKS = (0.0, 0.02, 0.1, 0.9, 0.98)
"""Shares of a phase's computing at which it is cut. Gathers before its first op and reductions after its last have
nothing to hide behind, the bulk has everything; in between twice a factor of about five."""
SEGMENTS = len(MARKS) + 1
COMPUTING, MOVING = ("chain", "filler"), ("at hand", "ending", "awaited")
LINKS = 2
"""Over which collectives run side by side, at most (`CollectivePrices.link`)."""
_ROLES = (*COMPUTING, *MOVING * LINKS)
_PHASE = SEGMENTS * len(_ROLES)
KINDS = 2 * _PHASE + 1
"""Of two phases, and `EXPOSED`."""

Read = tuple[str, int]


@dataclass(frozen=True)
class StepKinds:
    """nodes: op -> kind; reads: (reader, position among its tensor operands) -> kind over the first link (`on_link`);
    others are EXPOSED. ways: by which transfers are brought about; None: over one link."""

    nodes: Mapping[str, int]
    reads: Mapping[Read, int]
    ways: Redistributor | None = None

    @property
    def links(self) -> int:
        return 1 if self.ways is None else self.ways.link_count

    def totals(self, records: Iterable[NodeRecord]) -> Array:
        """Seconds by kind of a planned step, from the records of its plan."""
        totals = np.zeros(KINDS)
        for record in records:
            totals[self.nodes.get(record.name, EXPOSED)] += record.seconds
            for position, operand in enumerate(record.operands):
                kind = self.reads.get((record.name, position), EXPOSED)
                for transfer in operand.transfers:
                    link = 0 if self.ways is None else self.ways.link(transfer.step.axes)
                    totals[on_link(kind, link)] += transfer.seconds
        return totals


def step_kinds(
    joint: JointGraph, hidden: HiddenReads, seconds: Mapping[str, float], ways: Redistributor | None = None
) -> StepKinds:
    """Kinds of the ops and reads of `joint`. seconds: about what each op computes, by name: where the marks are."""
    assert ways is None or ways.link_count <= LINKS
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
            nodes[op.name] = kind_of(phase, "filler" if op in fillers else "chain", places[op.name][2])
    return StepKinds(nodes, _reads(joint, hidden, places), ways)


def kind_of(phase: int, role: str, segment: int, link: int = 0) -> int:
    return on_link(phase * _PHASE + _ROLES.index(role) * SEGMENTS + segment, link)


def kinds_of_phase(phase: int) -> slice:
    return slice(phase * _PHASE, (phase + 1) * _PHASE)


def on_link(kind: int, link: int) -> int:
    """The kind of communication over that link that is of `kind` over the first."""
    return kind if kind == EXPOSED else kind + link * len(MOVING) * SEGMENTS


def ended_phase(kind: int) -> int | None:
    """The phase that communication of this kind is for the end of; None: of another kind."""
    role = kind % _PHASE // SEGMENTS
    return kind // _PHASE if kind != EXPOSED and _ROLES[role] == "ending" else None


def ended_seconds(totals: Array, phase: int) -> float:
    """Of these seconds by kind, those of communication that is for the end of the phase."""
    first = kind_of(phase, "ending", 0)
    over = (on_link(first, link) for link in range(LINKS))
    return sum(float(totals[kind : kind + SEGMENTS].sum()) for kind in over)


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
                    found[read] = kind_of(phase, "awaited", begin)
                elif read in hidden.ending:
                    found[read] = kind_of(phase, "ending", _made(operand, places, begin))
                else:
                    found[read] = kind_of(phase, "at hand", begin)
    ends = [result for result in joint.results if result is not None]
    for place, end in enumerate(ends):
        made = places.get(result_index(end)[0].name)
        if ("output", place) in hidden.hides and made is not None:
            found["output", place] = kind_of(made[0], "ending", made[2])
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


CLOSE, EXPLAINED = 1e-3, 0.99
"""Share of a phase by which it may be off as it is, and of what is missing that may stay so for a share that hides to
be taken for the cause. Nothing is learned of what a plan does not have: what is left is a constant."""


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


def phase_paths(overlaps: Sequence[PhaseOverlap], links: int = 1) -> tuple[Array, ...]:
    """Per phase float64[paths, kinds]: what each path holds of the phase's seconds less all of them, times the
    efficiency.

    The seconds of a phase are those of all its kinds and the largest of `paths @ totals`, which is what hides,
    negative. The first path is the one of all computing.
    """
    return tuple(_paths(phase, overlap, links) for phase, overlap in enumerate(overlaps))


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


def _seconds(totals: Array, phase: int, overlap: PhaseOverlap) -> float:
    rows, hidden = _rows(phase, LINKS)
    longest = float((rows @ totals + (1.0 - overlap.awaited) * (hidden @ totals)).max())
    return float(totals[kinds_of_phase(phase)].sum()) + overlap.efficiency * longest + overlap.extra


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


def _paths(phase: int, overlap: PhaseOverlap, links: int) -> Array:
    rows, hidden = _rows(phase, links)
    return overlap.efficiency * _once(rows + (1.0 - overlap.awaited) * hidden)


def _once(rows: Array) -> Array:
    return np.array(list({row.tobytes(): row for row in rows}.values()))


@cache
def _rows(phase: int, links: int) -> tuple[Array, Array]:
    """What each path holds of the phase's seconds, but for what is awaited and may hide, less all of them; and that.

    Both float64[paths, kinds]. Some paths are the same where all of that hides, or nothing.
    """
    spans = [(0, SEGMENTS)]
    spans += [(i, j) for i in range(SEGMENTS + 1) for j in range(i, SEGMENTS + 1) if (i, j) != (0, SEGMENTS)]
    rows: list[Array] = []
    hidden: list[Array] = []
    every = range(links)
    for (first, last), role, ahead, behind in product(spans, ("filler", "awaited"), every, every):
        row, may_hide = np.zeros(KINDS), np.zeros(KINDS)
        _mark(row, phase, ("at hand", "awaited"), range(first), [ahead])
        _mark(row, phase, ("chain", role), range(first, last), every)
        if role == "filler":
            _mark(may_hide, phase, ("awaited",), range(first, last), every)
        _mark(row, phase, ("ending", "awaited"), range(last, SEGMENTS), [behind])
        rows.append(row)
        hidden.append(may_hide)
    for link in every:
        moved = np.zeros(KINDS)
        _mark(moved, phase, MOVING, range(SEGMENTS), [link])
        rows.append(moved)
        hidden.append(np.zeros(KINDS))
    both = _once(np.concatenate([np.array(rows) - _all(phase), np.array(hidden)], axis=1))
    return both[:, :KINDS], both[:, KINDS:]


def _all(phase: int) -> Array:
    every = np.zeros(KINDS)
    every[kinds_of_phase(phase)] = 1.0
    return every


def _mark(row: Array, phase: int, roles: tuple[str, ...], segments: range, links: Iterable[int]) -> None:
    """Communication over these links, and computing."""
    for role, segment in product(roles, segments):
        over = (0,) if role in COMPUTING else links
        row[[kind_of(phase, role, segment, link) for link in over]] = 1.0
