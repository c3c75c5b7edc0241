"""Which communication may run behind computation, and the seconds of a step that follow from it.

A collective hides if nothing waits for it while its phase computes: its `TransferRole` is "at hand" or "ending". What
is awaited, a partial sum between two products for example, counts in full; and so do two kinds that have a role but
nothing to hide behind:

    what the caller gives, for ops that run before any product    the input of the first layer, the loss's tangent
    what the caller waits for                                     everything that ends the forward

`passes.schedule.overlap` orders a rank's graph so that what may hide does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.ir.phase_ops import ops_by_phase
from passes.plan.records import NodeRecord
from passes.schedule.transfer_roles import PhaseRoles, TransferRole

__all__ = ["PHASES", "HiddenReads", "StepParts", "hidden_reads", "step_parts"]

PHASES: tuple[str, ...] = ("forward", "backward")
"""The phases of a step, in the order of `StepParts`. The optimizer's update follows and hides nothing."""


@dataclass(frozen=True)
class StepParts:
    """The seconds of one step by kind. compute, hideable: per phase of `PHASES`; exposed: everything that
    nothing hides (communication that is waited for, the optimizer's update)."""

    compute: tuple[float, ...]
    hideable: tuple[float, ...]
    exposed: float

    def seconds(self, efficiency: float) -> float:
        """exposed + sum over phases of compute + hideable - efficiency * min(compute, hideable).

        efficiency: `Profile.overlap_efficiency`, the measured share of the shorter of two things running
        at once that costs no time; 0 adds everything, 1 takes the longer.
        """
        pairs = zip(self.compute, self.hideable, strict=True)
        return self.exposed + sum(c + g - efficiency * min(c, g) for c, g in pairs)


@dataclass(frozen=True)
class HiddenReads:
    """Reads, each (name of the reader, position among its tensor operands); the reader "output" is the end of
    the graph. hides: whose redistribution may run behind computation.

    ending: those of them that only the end of the backward needs, reductions of gradients. Small ones travel
    together (`passes.schedule.bucket_plan`) and are priced so.
    """

    hides: frozenset[tuple[str, int]]
    ending: frozenset[tuple[str, int]]


def hidden_reads(joint: JointGraph) -> HiddenReads:
    """The reads of `joint` for which nothing waits, whatever the layouts."""
    forward, backward = ops_by_phase(joint)
    early, late = _with_roles(joint, forward, "input"), _with_roles(joint, backward, "tangent")
    ends = (spec for spec, result in zip(joint.outputs, joint.results, strict=True) if result is not None)
    ending = {read for read, role in late if role == "ending"}
    ending.update(("output", place) for place, spec in enumerate(ends) if spec.kind == "grad")
    at_hand = {read for read, role in (*early, *late) if role == "at hand"}
    return HiddenReads(frozenset(at_hand | ending), frozenset(ending))


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
        if result_index(node)[0] is node:
            for position, operand in enumerate(tensor_operands(node)):
                if not (first and operand in callers):
                    found.append(((node.name, position), roles.of(node, operand)))
    return found


def step_parts(records: Iterable[NodeRecord]) -> StepParts:
    """The seconds of a planned step by kind, from the records of its plan.

    A transfer to the program's end belongs to the phase that computed the value.
    """
    compute, hides = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    exposed = 0.0
    phases: dict[str, str] = {}
    for record in records:
        phases[record.name] = record.phase
        if record.op == "param":
            exposed += record.seconds  # the optimizer's update
        else:
            compute[record.phase] += record.seconds
        for operand in record.operands:
            seconds = sum(transfer.seconds for transfer in operand.transfers)
            if operand.hides:
                hides[phases[operand.source] if record.op == "output" else record.phase] += seconds
            else:
                exposed += seconds
    return StepParts(tuple(compute.values()), tuple(hides.values()), exposed)
