"""Which communication may run behind computation, and the seconds of a step that follow from it.

A collective hides if nothing waits for what it moves while its phase still computes:

    its operand is at hand from the start of the phase    a parameter's shard, a value saved for the backward
    only the end of the program reads its result          a gradient on its way to its parameter's layout

Everything else, a partial sum between two products for example, is waited for and counts in full.
`passes.schedule.overlap` orders a rank's graph so that what may hide does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import JointGraph, result_index, tensor_operands
from passes.ir.op_traits import fuses, is_view
from passes.plan.records import NodeRecord

__all__ = ["PHASES", "HiddenReads", "StepParts", "ending_reads", "hidden_reads", "step_parts"]

PHASES: tuple[str, ...] = ("forward", "backward")
"""Of a step, in the order of `StepParts`. The optimizer's update follows and hides nothing."""


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
    the graph. hides: whose redistribution may run behind computation. ending: `ending_reads`, part of them."""

    hides: frozenset[tuple[str, int]]
    ending: frozenset[tuple[str, int]]


def hidden_reads(joint: JointGraph) -> HiddenReads:
    """The reads of `joint` for which nothing waits."""
    at_hand = _at_hand(joint)
    ending = ending_reads(joint)
    found = set(ending)
    for node in joint.graph.nodes:
        if node.op != "call_function" or result_index(node)[0] is not node:
            continue
        for position, operand in enumerate(tensor_operands(node)):
            saved = _phase(node) == "backward" and _phase(operand) == "forward"
            if operand in at_hand or saved:
                found.add((node.name, position))
    return HiddenReads(frozenset(found), ending)


def ending_reads(joint: JointGraph) -> frozenset[tuple[str, int]]:
    """Those of which only the end of the program reads the result: reductions of gradients. Nobody waits for
    them, so small ones can travel together (`passes.schedule.bucket_plan`) and are priced so."""
    ending = _ending(joint)
    inputs = set(joint.placeholders)
    found = {
        (node.name, position)
        for node in ending
        if result_index(node)[0] is node
        for position, operand in enumerate(tensor_operands(node))
        if operand not in inputs
    }
    ends = (result for result in joint.results if result is not None)
    found.update(("output", place) for place, end in enumerate(ends) if _phase(end) == "backward")
    return frozenset(found)


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


def _at_hand(joint: JointGraph) -> set[fx.Node]:
    """Values that no input of the call and no tangent reaches: parameters, and their casts and views."""
    found: set[fx.Node] = set()
    for node, spec in zip(joint.placeholders, joint.inputs, strict=True):
        if spec.kind not in ("input", "tangent"):
            found.add(node)
    for node in joint.graph.nodes:
        operands = tensor_operands(node) if node.op == "call_function" else ()
        if operands and all(operand in found for operand in operands):
            found.add(node)
    return found


def _ending(joint: JointGraph) -> set[fx.Node]:
    """Ops of the backward that only pass a result to the program's end: casts, views, `use`."""
    found: set[fx.Node] = set()
    for node in reversed(joint.graph.nodes):
        if node.op != "call_function" or _phase(node) != "backward" or not node.users:
            continue
        passes_on = is_view(node) or fuses(node)
        one_operand = len(tensor_operands(node)) == 1
        if passes_on and one_operand and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found


def _phase(node: fx.Node) -> str:
    return str(node.meta.get("phase", "forward"))
