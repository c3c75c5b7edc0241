"""Which ops are worth computing in parts, so that a halo travels meanwhile: decided from prices."""

from __future__ import annotations

from collections.abc import Mapping

from passes.ir.joint import JointGraph, node_values
from passes.layout.assignment import Assignment
from passes.lower.interior import PossibleInterior, possible_interiors
from passes.plan.transfers import Transfer
from passes.redistribution.redistribute import Redistribution
from passes.strategies.prices import Prices, local_nbytes

__all__ = ["find_interiors"]


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
