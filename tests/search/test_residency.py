"""What is alive when, as the search counts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from passes.ir.op_traits import is_either
from passes.lower.missing_tangents import without_usually_missing
from passes.search.graph_ends import boundary_of
from passes.search.offered import build_offered
from passes.search.search_space import SearchSpace
from passes.states.cut_points import places
from passes.states.offers import offered
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
