"""Random models, meshes, layouts, pieces and states: every rank's programs compute what the unsharded model does.

`pytest -m slow` runs 2,000 cases.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.micro_batches.cut_batch import cut_batch
from passes.simulate.reference import graph_values, reference_inputs
from passes.states.compute_again import compute_again
from passes.states.offers import candidates
from tests.micro_batches.test_pieces_on_ranks import Chosen, compare, pieces_on_ranks

AXES = ({"dp": 2}, {"dp": 3}, {"tp": 4}, {"dp": 2, "tp": 2})


class RandomModel(nn.Module):
    """Tokens or rows through a few random layers, to a loss, to rows, or to both."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width = draw.choice([4, 6])
        self.kinds = [
            draw.choice(["linear", "norm", "mlp", "drop", "mix", "attend"])
            for _ in range(draw.randrange(1, 4))
        ]
        self.ends = draw.choice(["mean", "sum", "weighted", "rows", "both"])
        self.layers = nn.ModuleList(map(self._layer, self.kinds))

    def _layer(self, kind: str) -> nn.Module:
        n = self.width
        if kind == "norm":
            return nn.LayerNorm(n)
        if kind == "mlp":
            return nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n))
        return nn.Dropout(0.3) if kind == "drop" else nn.Linear(n, n)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            y = layer(x)
            if kind == "attend":
                y = nn.functional.scaled_dot_product_attention(y, x, x, is_causal=True)
            elif kind == "mix":
                y = y.softmax(-1) * x.sum(1, keepdim=True)
            x = x + y
        if self.ends == "rows":
            return x
        loss = {
            "mean": lambda: x.square().mean(),
            "sum": lambda: x.tanh().exp().sum() * 0.1,  # of a large x gradients cancel, and with them digits
            "weighted": lambda: (x.square() * (x > 0)).sum() / ((x.detach() > 0).sum() + 1),
            "both": lambda: x.abs().mean(),
        }[self.ends]()
        return (loss, x) if self.ends == "both" else loss


def _again(graph: JointGraph, draw: random.Random, share: float) -> list[str]:
    return [node.name for node in candidates(graph, ()) if draw.random() < share]


def check(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = RandomModel(draw).double()
    if model.ends == "weighted":  # its count is one of what the model computes: it needs all pieces
        model.ends = "mean"
    batch = draw.randrange(2, 8)
    x = torch.randn(batch, draw.choice([2, 5]), model.width, dtype=torch.float64)
    joint = canonical_capture(model, (x,), {}).joint
    values = reference_inputs(joint, model, [x], seed=seed)
    for place, spec in enumerate(joint.inputs):
        if spec.kind == "tangent" and spec.index > 0:
            values[place] = torch.zeros_like(values[place])
    wanted, _ = graph_values(joint, values)
    cut = cut_batch(joint, draw.randrange(2, batch + 1))
    names = _again(cut, draw, draw.choice([0.0, 0.3, 1.0]))
    graphs = tuple(compute_again(graph, names) for graph in (cut, *cut.others))
    mesh = MeshSpec(draw.choice(AXES))
    first, pieces = pieces_on_ranks(graphs, mesh, Chosen(f"{seed}", draw.choice([0.0, 0.2])))
    compare(joint, values, wanted, mesh, first, pieces)


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(20))
def test_many_random_cases(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(seed)
