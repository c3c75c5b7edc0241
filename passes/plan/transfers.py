"""The redistributions that layouts ask for, and of which phase each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.ir.op_traits import is_of_piece, is_piece
from passes.ir.phase_ops import segments
from passes.layout.assignment import Assignment
from passes.layout.layout import Layout
from passes.plan.planned_graph import Transfer


@dataclass(frozen=True, eq=False)
class Move:
    """A transfer. moves: whether it needs a collective (of some rank). start, end: places in its phase's ops
    of the op that computes the operand (-1: at hand from the start) and of the reader (their number: the
    end of the phase)."""

    reader: fx.Node
    index: int
    operand: fx.Node
    held: Layout
    wanted: Layout
    moves: bool
    start: int = -1
    end: int = 0

    @property
    def transfer(self) -> Transfer:
        return self.reader.name, self.index


def transfers(joint: JointGraph, assignment: Assignment) -> list[Move]:
    """What `assignment` asks for, in the order of the graph; not yet placed in a phase."""
    found: list[Move] = []
    for reader in joint.graph.nodes:
        if reader.op == "placeholder" or result_index(reader)[0] is not reader:
            continue
        wanted = assignment[reader.name].operands
        for index, (operand, layout) in enumerate(zip(tensor_operands(reader), wanted, strict=True)):
            producer, result = result_index(operand)
            held = assignment[producer.name].results[result]
            if held != layout:
                found.append(Move(reader, index, operand, held, layout, not _is_local(held, layout)))
    return found


def _is_local(held: Layout, wanted: Layout) -> bool:
    """Whether every rank has its part already: it slices, or starts a pending sum."""
    for dim, (mine, theirs, *sizes) in enumerate(
        zip(held.dims, wanted.dims, held.sizes, wanted.sizes, strict=True)
    ):
        if held.halos[dim] != wanted.halos[dim] and mine:
            return False
        nested = mine == theirs[: len(mine)] and sizes == [None, None]
        if mine and not nested and (mine, sizes[0]) != (theirs, sizes[1]):
            return False
    return set(held.partial) <= set(wanted.partial)


_FORWARD, _AFTER = 1, 3
"""Of a batch in pieces."""


def _late_transfers(joint: JointGraph, moves: Sequence[Move], forward: set[fx.Node]) -> set[Move]:
    """Those of the backward: only gradients depend on what they deliver. forward: its ops."""
    ends = zip(joint.outputs, joint.results, strict=True)
    kinds = [spec.kind for spec, result in ends if result is not None]
    at_end = lambda move: kinds[move.index] == "grad"
    return {m for m in moves if (at_end(m) if m.reader.op == "output" else m.reader not in forward)}


def by_segment(joint: JointGraph, moves: Sequence[Move]) -> list[tuple[Sequence[fx.Node], list[Move]]]:
    """Per part of a step in which transfers have an order of their own, in order, its ops and its transfers: those of
    the backward bring what only gradients depend on."""
    parts = joint.known("segments", lambda: segments(joint))
    if joint.pieces == 1:
        late = _late_transfers(joint, moves, set(parts.forward))
        return [
            (parts.forward, [m for m in moves if m not in late]),
            (parts.backward, [m for m in moves if m in late]),
        ]
    ordered: tuple[Sequence[fx.Node], ...] = (parts.before, parts.forward, parts.backward, parts.after)
    place = {node: number for number, ops in enumerate(ordered) for node in ops}
    part = {move: _part(move, place) for move in moves}
    return [(ops, [m for m in moves if part[m] == number]) for number, ops in enumerate(ordered)]


def _part(move: Move, place: Mapping[fx.Node, int]) -> int:
    if move.reader.op != "output":
        return 0 if is_piece(move.reader) else place.get(move.reader, _AFTER)
    # What a stage of a pipeline sends is brought to where it is sent from in every piece.
    if not is_of_piece(move.operand):
        return _AFTER
    return place.get(result_index(move.operand)[0], _FORWARD)
