"""Where rows of experts become rows of all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from passes.canonicalize import canonicalize
from passes.capture import capture
from tests.canonicalize.test_mark_rows import EXPERTS, ROUTINGS, WIDTH, Layer, routed_call, routed_mm

own_rows = torch.ops.autoshard.own_rows.default


def test_rows_end_in_sums() -> None:
    joint = canonicalize(capture(Layer().double(), routed_call(ROUTINGS["random"]()), {}).joint)
    marked = {node.name: node.meta["rows"] for node in joint.graph.nodes if "rows" in node.meta}
    ends = {name: rows.pending for name, rows in marked.items() if "_rows" in name}
    # tokens in the forward, their gradient, of two experts each; those of bias and weights in the backward
    assert ends == {
        "own_rows": "sum1of6",
        "own_rows_1": "sum1of6",
        "sum_rows": "sum2of6",
        "sum_rows_1": "sum2of6",
    }


class Side(nn.Module):
    """Products of the same routing that end in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(EXPERTS, WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = x[:, :, None, :].expand(*ids.shape, WIDTH)
        return (
            torch.cat([routed_mm(rows, w, ids, 0, EXPERTS).tanh() for w in self.experts], 1).square().sum()
            * weights.sum()
        )


def test_they_end_in_the_graphs_order() -> None:
    """Nodes lie in a set as their addresses fall, which are others in every process."""
    joint = canonicalize(capture(Side().double(), routed_call(ROUTINGS["random"]()), {}).joint)
    order = {node: place for place, node in enumerate(joint.graph.nodes)}
    ended = [order[node.all_input_nodes[0]] for node in order if node.target is own_rows]
    assert len(ended) == 4 and ended == sorted(ended)


class Chosen(nn.Module):
    """A condition on products, for a choice among rows of all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.others = nn.Parameter(torch.randn(4, 8, 2, WIDTH))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows = x[:, :, None, :].expand(*ids.shape, WIDTH)
        y = routed_mm(rows, self.experts, ids, 0, EXPERTS).tanh()
        chosen = torch.where((y > 0) & (y < 0.9), y, 0.0)
        return (chosen.sum(2) * weights.sum(-1, keepdim=True)).sum() + (chosen > 0).sum() + self.others.sum()


def test_conditions_are_of_all_rows() -> None:
    """A rank's zeros for others' rows are no summand of a condition."""
    model, call = Chosen().double(), routed_call(ROUTINGS["random"]())
    joint = canonicalize(capture(model, call, {}).joint)
    ended = [node.all_input_nodes[0] for node in joint.graph.nodes if node.target is own_rows]
    assert ended and all(node.meta["val"].is_floating_point() for node in ended)
