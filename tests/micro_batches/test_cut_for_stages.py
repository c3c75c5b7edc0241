"""The graph of which stages are cut: pieces, or one of each size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph, node_value
from passes.micro_batches.cut_batch import cut_batch, cut_for_stages, first_of_each_size
from passes.plan.describe import graph_hash
from tests.stages.stage_models import canonical


@pytest.mark.parametrize(("name", "count", "sizes"), [("mlp", 3, 2), ("mlp", 5, 1), ("gpt2", 2, 1)])
def test_one_graph_of_each_size(name: str, count: int, sizes: int) -> None:
    """Five rows in three pieces are 2, 2 and 1."""
    joint, _ = canonical(name)
    every, few = cut_batch(joint, count), cut_for_stages(joint, count, sizes_only=True)
    firsts = sorted(set(first_of_each_size((every, *every.others))))
    graphs = [(every, *every.others)[place] for place in firsts]
    assert len(graphs) == sizes and few.pieces == count
    found = [graph_hash(graph) for graph in (few, *few.others)]
    assert [graph_hash(graph) for graph in graphs] == found
    whole = cut_for_stages(joint, count)
    assert [graph_hash(g) for g in (whole, *whole.others)] == [graph_hash(g) for g in (every, *every.others)]


@pytest.mark.parametrize(("rows", "sizes"), [(10, [3, 3, 2, 2]), (11, [3, 3, 3, 2]), (7, [2, 2, 2, 1])])
def test_sizes_of_pieces_differ_by_at_most_one(rows: int, sizes: list[int]) -> None:
    """torch.chunk would make 3, 3, 3 and 1 of 10. For stages the sizes are those of the pieces that run."""
    joint = canonical_capture(nn.Linear(6, 1), (torch.randn(rows, 6),), {}).joint
    every, few = cut_batch(joint, 4), cut_for_stages(joint, 4, sizes_only=True)
    assert [_rows(graph) for graph in (every, *every.others)] == sizes
    assert [_rows(graph) for graph in (few, *few.others)] == sorted(set(sizes), reverse=True)


def _rows(joint: JointGraph) -> int:
    """Of the part of the input that a piece reads."""
    part = next(n for n in joint.graph.nodes if n.target is torch.ops.autoshard.piece.default)
    return node_value(part).shape[0]


def test_one_piece_gives_a_gradient_to_the_loss_alone() -> None:
    """GPT-2 returns logits and keys and values beside its loss."""
    joint, _ = canonical("gpt2")
    one = cut_for_stages(joint, 1)
    read = {node.name for node in one.placeholders if node.users}
    assert {"tangent_0"} == {name for name in read if name.startswith("tangent")}
    assert len([n for n in joint.placeholders if n.users and n.name.startswith("tangent")]) > 1
