"""What an alternative costs more is what the whole problem costs more with that node's layouts changed alone."""

from __future__ import annotations

import pytest

from autoshard.plan.judged import prices_as_in
from autoshard.plan.task import search_plan
from cost_model.deadline import NEVER
from passes.search.find import MOST
from passes.search.strategy_space import SpaceBuilder
from passes.states.compute_again import compute_again
from tests.plans.pipelines import SQUARE, stage_task


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_costs_are_those_of_the_problem(name: str) -> None:
    task = stage_task(name, SQUARE)
    plan = search_plan(task)
    joint = compute_again(task.joint, plan.planned.again)
    space = SpaceBuilder(joint, prices_as_in(plan, task.prices), task.boundary).built()
    chosen = [
        strategies.index(plan.planned.layouts[name]) if name in plan.planned.layouts else None
        for name, strategies in zip(space.names, space.strategies, strict=True)
    ]
    ends = {
        slot: plan.planned.layouts["output"].operands[i]
        for i, slot in enumerate(s for s in space.output_slots if s is not None)
    }
    choice = [
        next(p for p, s in enumerate(space.strategies[i]) if s.results[0] == ends[i])
        if place is None
        else place
        for i, place in enumerate(chosen)
    ]
    ops = [record.name for record in plan.records if record.operands and record.op != "output"]
    found = task.again().alternatives(plan, ops, NEVER)
    assert set(found) == set(ops)
    others = 0
    for op, ways in found.items():
        at = space.names.index(op)
        assert ways[0].layouts == plan.planned.layouts[op] and ways[0].more == 0.0 and len(ways) <= MOST
        costs = [
            space.problem.cost([*choice[:at], place, *choice[at + 1 :]]) - space.problem.cost(choice)
            for place in range(len(space.strategies[at]))
        ]
        for way in ways[1:]:
            assert way.more == pytest.approx(costs[space.strategies[at].index(way.layouts)], abs=1e-12)
        wanted = sorted(cost for place, cost in enumerate(costs) if place != choice[at] and cost < 1e30)
        assert [way.more for way in ways[1:]] == pytest.approx(wanted[: MOST - 1], abs=1e-12)
        others += len(ways) - 1
    assert others > 10
