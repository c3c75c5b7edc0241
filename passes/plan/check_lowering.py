"""Does what a plan file decides fit the model? What its records alone cannot show."""

from __future__ import annotations

from collections.abc import Iterator

from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.lower.interior import possible_interiors
from passes.plan.lowering_plan import LoweringPlan
from passes.plan.transfers import by_segment, transfers
from passes.strategies.cuts import ops_of

__all__ = ["lowering_problems"]

_PARTS = ("forward", "backward")
_PARTS_OF_PIECES = (
    "part before the pieces",
    "forward of a piece",
    "backward of a piece",
    "part after the pieces",
)


def lowering_problems(joint: JointGraph, assignment: Assignment, lowering: LoweringPlan) -> Iterator[str]:
    """What of `lowering` cannot be of `joint`, in sentences. Its records are whole (`autoshard.plan.plan_check`) and of
    this graph: every transfer has steps that lead where they should, and a turn after those that it needs."""
    unknown = list(_unknown_factors(joint, assignment))
    yield from unknown
    names = _PARTS if joint.pieces == 1 else _PARTS_OF_PIECES
    for number, (_, moves) in enumerate(by_segment(joint, transfers(joint, assignment))):
        for move in moves:
            phase = lowering.turns[move.transfer][0]
            if phase != number:
                reader, position = move.transfer
                said = names[phase] if phase < len(names) else f"part {phase} of the step"
                yield f"operand {position} of node {reader} has a turn in the {said}"
    if unknown or not lowering.interiors:
        return
    possible = {p.node.name: p.factor for p in possible_interiors(joint, assignment, lowering.steps)}
    for name, factor in lowering.interiors.items():
        if possible.get(name) != factor:
            yield f"node {name} cannot be computed in parts along {factor}"


def _unknown_factors(joint: JointGraph, assignment: Assignment) -> Iterator[str]:
    for node, rule in ops_of(joint):
        factors = [split.factor for split in assignment[node.name].splits]
        if not any(all(factor in way.sizes for factor in factors) for way in rule.ways):
            yield f"node {node.name} is split along {', '.join(factors)}, and its op has no such factor"
