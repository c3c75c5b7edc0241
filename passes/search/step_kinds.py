"""Which seconds of a step may run side by side: kinds of computing and communication, and the paths through them.

A phase's ops run one after the other, and so do its collectives; the two streams run side by side. Collectives are of
three roles (`passes.schedule.hiding`): what is at hand (gathered before its reader), what only the end needs (reduced
after its producer), and what is waited for. Ops are of two: those that a product comes after, and *fillers*, such as the
product that makes a weight's gradient, behind which the backward's awaited collectives can hide.

A phase is cut at `MARKS` of its computing. Whatever the order of its collectives, it takes at least, for every i < j,

    communication at hand or awaited, read before mark i
    + computing between the marks: all of it, or all but fillers and with it what is awaited
    + communication awaited or for the end only, of values made after mark j

that is the bound of a two-machine flow shop [Johnson 1954] for a graph whose ends have nothing to hide behind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.ir.op_traits import is_product
from passes.ir.phase_ops import ops_by_phase
from passes.plan.records import NodeRecord
from passes.schedule.hiding import HiddenReads
from passes.solver.problem import Array

__all__ = ["EXPOSED", "StepKinds", "step_kinds"]

EXPOSED = -1
"""The kind of what nothing hides: the last column."""
MARKS = (0.0, 0.02, 0.1, 0.9, 0.98)
"""Shares of a phase's computing at which it is cut. Gathers before its first op and reductions after its last have nothing
to hide behind, the bulk has everything; in between twice a factor of about five."""
_SEGMENTS = len(MARKS) + 1
_ROLES = ("chain", "filler", "at hand", "ending", "awaited")
_PHASE = _SEGMENTS * len(_ROLES)

Read = tuple[str, int]


@dataclass(frozen=True)
class StepKinds:
    """nodes: op -> kind; reads: (reader, position among its tensor operands) -> kind; others are EXPOSED.
    paths: per phase float64[paths, kinds]: 1 for what the path holds of the phase less 1 for all of the phase."""

    nodes: Mapping[str, int]
    reads: Mapping[Read, int]
    paths: tuple[Array, ...]

    def totals(self, records: Iterable[NodeRecord]) -> Array:
        """Seconds by kind of a planned step, from the records of its plan."""
        totals = np.zeros(self.paths[0].shape[1])
        for record in records:
            totals[self.nodes.get(record.name, EXPOSED)] += record.seconds
            for position, operand in enumerate(record.operands):
                kind = self.reads.get((record.name, position), EXPOSED)
                totals[kind] += sum(transfer.seconds for transfer in operand.transfers)
        return totals


def step_kinds(joint: JointGraph, hidden: HiddenReads, seconds: Mapping[str, float]) -> StepKinds:
    """Kinds of the ops and reads of `joint`. seconds: about what each op computes, by name: where the marks are."""
    phases = ops_by_phase(joint)
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
    return StepKinds(nodes, _reads(joint, hidden, places), tuple(_paths(p, len(phases)) for p in range(len(phases))))


def _kind(phase: int, role: str, segment: int) -> int:
    return phase * _PHASE + _ROLES.index(role) * _SEGMENTS + segment


def _reads(
    joint: JointGraph, hidden: HiddenReads, places: Mapping[str, tuple[int, int, int]]
) -> dict[Read, int]:
    found: dict[Read, int] = {}
    for node in joint.graph.nodes:
        if node.op == "call_function" and result_index(node)[0] is node and node.name in places:
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


def _paths(phase: int, phases: int) -> Array:
    """The first two are the whole computing: with what is awaited, and without."""
    columns = phases * _PHASE + 1
    every = np.zeros(columns)
    every[phase * _PHASE : (phase + 1) * _PHASE] = 1.0
    rows: dict[bytes, Array] = {}
    spans = [(0, _SEGMENTS)]
    spans += [(i, j) for i in range(_SEGMENTS + 1) for j in range(i, _SEGMENTS + 1) if (i, j) != (0, _SEGMENTS)]
    for first, last in spans:
        for middle in (("chain", "awaited"), ("chain", "filler")):
            row = np.zeros(columns)
            _mark(row, phase, ("at hand", "awaited"), range(first))
            _mark(row, phase, middle, range(first, last))
            _mark(row, phase, ("ending", "awaited"), range(last, _SEGMENTS))
            rows.setdefault(row.tobytes(), row - every)
    everything = np.zeros(columns)
    _mark(everything, phase, ("at hand", "ending", "awaited"), range(_SEGMENTS))
    rows.setdefault(everything.tobytes(), everything - every)
    return np.array(list(rows.values()))


def _mark(row: Array, phase: int, roles: tuple[str, ...], segments: range) -> None:
    for role in roles:
        for segment in segments:
            row[_kind(phase, role, segment)] = 1.0
