"""Which communication may run behind computation.

A collective hides if nothing waits for it while its phase computes: its `TransferRole` is "at hand" or "ending". What
is awaited, a partial sum between two products for example, counts in full; and so do two kinds that have a role but
nothing to hide behind:

    what the caller gives, for ops that run before any product    the input of the first layer, the loss's tangent
    what the caller waits for                                     everything that ends the forward

`passes.schedule.overlap` orders a rank's graph so that what may hide does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.ir.op_traits import is_piece
from passes.ir.phase_ops import segments
from passes.schedule.transfer_roles import PhaseRoles, TransferRole


@dataclass(frozen=True)
class HiddenReads:
    """Reads, each (name of the reader, position among its tensor operands); the reader "output" is the end of
    the graph. hides: whose redistribution may run behind computation.

    ending: what only the end of the backward needs, reductions of gradients. Small ones travel
    together (`passes.schedule.bucket_plan`) and are priced so.
    """

    hides: frozenset[tuple[str, int]]
    ending: frozenset[tuple[str, int]]


def hidden_reads(joint: JointGraph) -> HiddenReads:
    """The reads of `joint` for which nothing waits, whatever the layouts."""
    parts = segments(joint)
    early, late = _with_roles(joint, parts.forward, "input"), _with_roles(joint, parts.backward, "tangent")
    ends = (spec for spec, result in zip(joint.outputs, joint.results, strict=True) if result is not None)
    ending = {read for read, role in late if role == "ending"}
    at_hand = {read for read, role in (*early, *late) if role == "at hand"}
    at_end = {("output", place) for place, spec in enumerate(ends) if spec.kind == "grad"}
    # What is done once, behind the pieces of a batch, has nothing left to hide behind.
    hides = at_hand | ending | (at_end if joint.pieces == 1 else set())
    return HiddenReads(frozenset(hides), frozenset(ending | at_end))


def _with_roles(
    joint: JointGraph, ops: Sequence[fx.Node], given: str
) -> list[tuple[tuple[str, int], TransferRole]]:
    """Reads of the ops of a phase. given: the kind of input that the caller gives it; reads of those before any
    product are left out."""
    roles = PhaseRoles(ops)
    callers = {n for n, spec in zip(joint.placeholders, joint.inputs, strict=True) if spec.kind == given}
    found: list[tuple[tuple[str, int], TransferRole]] = []
    for node in ops:
        first = all(map(roles.given, node.all_input_nodes))
        if first and any(n in callers for n in node.all_input_nodes):
            callers.add(node)
        if result_index(node)[0] is node and not is_piece(node):
            for position, operand in enumerate(tensor_operands(node)):
                if not (first and operand in callers):
                    found.append(((node.name, position), roles.of(node, operand)))
    return found
