"""One rank's graph of a plan, lowered with the steps that the plan was priced with."""

from __future__ import annotations

from collections.abc import Mapping

from passes.assignment import Assignment
from passes.bind_device import bind_device
from passes.interior import find_interiors
from passes.issue_order import Transfer, Turn
from passes.joint import JointGraph
from passes.partition import RankGraph, partition
from passes.rules.registry import RuleTable
from passes.search.space import Prices

__all__ = ["lower_rank"]


def lower_rank(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    rank: int,
    groups: Mapping[tuple[str, ...], str],
    turns: Mapping[Transfer, Turn],
    rules: RuleTable | None = None,
) -> RankGraph:
    """`partition` of `rank` with the redistributions of `prices`: what the search priced is what runs.

    groups: name of the process group of every tuple of axes. turns: of `passes.bucket_plan.bucketed_turns`
    or `passes.issue_order`; found once, for all ranks alike. The graph is bound to `joint.device`.
    """
    alone, merged = prices.redistributor, prices.merged
    interiors = find_interiors(joint, assignment, prices, rules)
    ours = partition(joint, assignment, prices.mesh, rank, groups, alone, rules, turns, merged, interiors)
    bind_device(ours.module, joint.device)
    return ours
