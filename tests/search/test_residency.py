"""What is alive when, as the search counts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from autoshard import MeshSpec, Profile
from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from passes.ir.joint import node_value
from passes.ir.op_traits import is_either, is_use, is_view
from passes.lower.rank_program import without_usually_missing
from passes.search.offered import LimitedBuilder, build_offered
from passes.search.residency import InPlace, may_be_another
from passes.search.search_space import SearchSpace
from passes.search.search_terms import boundary_of
from passes.search.strategy_space import SpaceBuilder
from passes.states.offers import offered, places
from tests.plans.pipelines import PP, planned, stage_task


def test_what_a_piece_keeps_is_there_once_for_each_piece_in_flight() -> None:
    """Throughout the step; and nothing else of it is. Of the second stage: it keeps what it received, too."""
    task = stage_task("gpt2")
    second = planned("gpt2", PP, 2).stage_graphs(task.joint)[1]
    stage = second.joint

    def space(in_flight: int) -> SearchSpace:
        usual = without_usually_missing(replace(stage, in_flight=in_flight))
        return build_offered(offered(usual, places(usual), task.prices.traffic), task.prices, ends)

    outputs = [i for i, spec in enumerate(stage.outputs) if spec.kind == "output"]
    ends = boundary_of(stage, {}, {}, dict.fromkeys(outputs), outputs)
    usual = without_usually_missing(stage)
    nodes = {n.name: n for n in offered(usual, places(usual), task.prices.traffic).joint.graph.nodes}
    alone, three = space(1), space(3)
    rows = zip(alone.names, alone.problem.intervals, alone.problem.usages, strict=True)
    others = zip(three.problem.intervals, three.problem.usages, strict=True)
    eithers, received = 0, set[str]()
    for (name, interval, usage), (other, held) in zip(rows, others, strict=True):
        node = nodes.get(name)
        if np.array_equal(held, usage) and interval == other:
            continue
        assert node is not None and node.meta["runs"] == "piece"
        assert other == (0, len(nodes)) and np.array_equal(held, 3 * usage)
        eithers += is_either(node)
        if node.op == "placeholder":
            received.add(name)
    assert eithers > 1 and received == {crossing.name for crossing in second.received}


def test_a_view_in_another_layout_is_a_copy_of_its_own() -> None:
    """The pooling, and its backward, read a view of what is normed in groups. As long as the backward has not read it,
    it holds all that it was brought into another layout for; in the layout of its operand nothing."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2))
    joint = canonical_capture(model, (torch.zeros(2, 3, 8, 8),), {}).joint
    ops = [n for n in joint.graph.nodes if n.op == "call_function"]
    late = [n for n in ops if is_view(n) and not is_use(n) and may_be_another(n)]
    views = [n.name for n in late if node_value(n).shape == (2, 8, 8, 8)]
    prices = prices_of(Profile.load("cpu"), MeshSpec({"dp": 2}), "eager")
    ends = boundary_of(joint, {}, {}, {}, [0])
    limited = LimitedBuilder(joint, prices, ends).built(2**30)
    unlimited = SpaceBuilder(joint, prices, ends).built()
    assert views
    for name in views:
        place = limited.names.index(name)
        for strategy, usage in zip(limited.strategies[place], limited.problem.usages[place], strict=True):
            elements = 2 * 8 * 8 * 8 // (2 if any(strategy.operands[0].dims) else 1)
            assert usage == (0 if isinstance(strategy, InPlace) else 4 * elements)
        assert not unlimited.problem.usages[unlimited.names.index(name)].any()
