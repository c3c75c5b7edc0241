"""Which seconds of a step may run side by side: kinds of computing and communication.

A phase's ops run one after the other, and so do its collectives over one link; computing and the links run side by
side. Collectives are of three roles (`passes.schedule.transfer_roles`): what is at hand (gathered before its reader),
what only the end needs (reduced after its producer), and what is waited for. Ops are of two: those that a product comes
after, and *fillers*, such as the product that makes a weight's gradient, behind which the backward's awaited
collectives can hide. A phase is cut at `MARKS` of its computing. How long it takes then: `passes.search.phase_paths`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from passes.ir.joint import JointGraph, result_index, segments, tensor_operands
from passes.ir.op_traits import is_piece, is_product
from passes.plan.planned_graph import NodeRecord
from passes.redistribution.redistribute import Redistributor
from passes.schedule.transfer_roles import HiddenReads
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
