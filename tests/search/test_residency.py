"""What is alive when, as the search counts it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from passes.search.graph_ends import boundary_of
from passes.search.strategy_space import build_space
from tests.plans.pipelines import PP, planned, stage_task


def test_what_a_piece_keeps_is_there_once_for_each_piece_in_flight() -> None:
    """Throughout the step; and nothing else of it is."""
    task = stage_task("gpt2")
    first = planned("gpt2", PP, 2).stage_graphs(task.joint)[0].joint
    sent = {i: None for i, spec in enumerate(first.outputs) if spec.kind == "output"}
    ends = boundary_of(first, {}, {}, sent, tuple(sent))
    alone, three = (build_space(replace(first, in_flight=n), task.prices, ends) for n in (1, 3))
    order = [node.name for node in first.graph.nodes]
    nodes = {node.name: node for node in first.graph.nodes}
    turn = next(i for i, name in enumerate(order) if nodes[name].meta.get("phase") == "backward")
    kept = 0
    rows = zip(alone.names, alone.problem.intervals, alone.problem.usages, strict=True)
    others = zip(three.problem.intervals, three.problem.usages, strict=True)
    for (name, (begin, stop), usage), (interval, held) in zip(rows, others, strict=True):
        node = nodes.get(name)
        piece = node is not None and node.meta.get("runs") == "piece"
        if piece and begin < turn < stop:
            assert interval == (0, len(order)) and np.array_equal(held, 3 * usage)
            kept += bool(usage.any())
        else:
            assert interval == (begin, stop) and np.array_equal(held, usage)
    assert kept > 5
