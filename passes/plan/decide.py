"""Once, after the search: how its layouts are lowered. The last that reads a price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from passes.ir.collector import collector_paused
from passes.ir.joint import JointGraph, node_value, node_values
from passes.layout.assignment import Assignment
from passes.lower.interior import PossibleInterior, possible_interiors
from passes.plan.transfers import LoweringPlan, Transfer, transfers
from passes.redistribution.redistribute import Redistribution, Redistributor
from passes.schedule.bucket_plan import bucketed_order
from passes.schedule.hiding import hidden_reads
from passes.schedule.issue_order import IssueOrder, issue_order
from passes.states.compute_again import copies_in
from passes.strategies.prices import Prices, local_nbytes

Moved = Mapping[Transfer, Redistribution]
"""Every transfer -> its steps, with the prices that they were chosen by."""


@collector_paused()
def decide_lowering(joint: JointGraph, assignment: Assignment, prices: Prices) -> tuple[LoweringPlan, Moved]:
    """The cheapest steps, the buckets that make a step shorter, and the interiors worth it, under `prices`."""
    moved = chosen_steps(joint, assignment, prices.redistributor, prices.merged)
    order = bucketed_order(joint, assignment, prices, moved)
    interiors = find_interiors(joint, assignment, prices, moved)
    return replace(lowered_by(moved, order, interiors), again=copies_in(joint)), moved


def chosen_steps(
    joint: JointGraph, assignment: Assignment, alone: Redistributor, merged: Redistributor | None = None
) -> Moved:
    """The steps of every transfer, chosen by `alone`; by `merged` where only the end of the program reads what they
    bring (`passes.schedule.hiding.hidden_reads`): such transfers share buckets, so their prices differ."""
    ending = frozenset[Transfer]()
    if merged is not None:
        ending = joint.known("hidden reads", lambda: hidden_reads(joint)).ending
    found: dict[Transfer, Redistribution] = {}
    for move in transfers(joint, assignment):
        value = node_value(move.operand)
        chooser = merged if merged is not None and move.transfer in ending else alone
        found[move.transfer] = chooser.plan(move.held, move.wanted, tuple(value.shape), value.element_size())
    return found


def lowered_by(moved: Moved, order: IssueOrder, interiors: Mapping[str, str] | None = None) -> LoweringPlan:
    return LoweringPlan(
        {t: found.steps for t, found in moved.items()}, order.turns, interiors or {}, order.ahead
    )


def unmerged(joint: JointGraph, assignment: Assignment, redistributor: Redistributor) -> LoweringPlan:
    """The steps that `redistributor` chooses, every collective alone, every op in one part."""
    return lowered_by(chosen_steps(joint, assignment, redistributor), issue_order(joint, assignment))


def find_interiors(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    moved: Mapping[Transfer, Redistribution],
) -> Mapping[str, str]:
    """Ops worth computing in parts, by name -> the factor whose parts they are. moved: every transfer's steps."""
    steps = {transfer: found.steps for transfer, found in moved.items()}
    return {
        found.node.name: found.factor
        for found in possible_interiors(joint, assignment, steps)
        if _gain(found, assignment, prices, sum(moved[t].seconds for t in found.exchanges)) > 0.0
    }


def _gain(found: PossibleInterior, assignment: Assignment, prices: Prices, exchanged: float) -> float:
    """Seconds saved: what is hidden, less what it takes. No more than half of the op is taken to be interior."""
    node, mesh = found.node, prices.mesh
    layouts = assignment[node.name]
    hidden = prices.overlap_efficiency * min(exchanged, 0.5 * prices.op_seconds(node, layouts))
    nbytes = sum(
        local_nbytes(layout, node, i, mesh)
        for i, layout in enumerate(layouts.results)
        if node_values(node)[i] is not None
    )
    copied = prices.compute.kernel_seconds(0.0, 2.0 * nbytes, "float32", None)
    return hidden - copied - 3 * prices.compute.launch_seconds
