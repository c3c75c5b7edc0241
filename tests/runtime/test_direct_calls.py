"""Layers of a parallel model called outside its forward, on what a script makes of parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.api.programs import assert_close, full, parallel
from tests.ranks import RankPool


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(7, 6))
        self.queries = nn.Parameter(torch.randn(1, 2, 5, 6))
        self.up, self.down = nn.Linear(6, 15), nn.Linear(15, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.attended(x + self.places)))).square().mean()

    def attended(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            self.queries.expand(len(x), -1, -1, -1), x[:, None], x[:, None]
        ).sum(1)


def _losses(model: Any, x: Tensor) -> list[Tensor]:
    """A layer takes the sum of a plain tensor and a parameter; weights made whole meet others; attention by a query."""
    whole = model.up.weight
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return [
        model.down(torch.tanh(model.up(x + model.places))).square().mean(),
        (whole @ model.down.weight).square().mean(),
        model.attended(x).square().mean(),
    ]


def _made() -> tuple[Attends, Tensor]:
    torch.manual_seed(0)
    return Attends().double(), torch.randn(4, 7, 6, dtype=torch.float64)


def _values(model: nn.Module, x: Tensor) -> dict[str, Any]:
    losses = _losses(model, x)
    torch.stack(losses).sum().backward()
    values = {str(number): loss for number, loss in enumerate(losses)}
    return full(values | {name: p.grad for name, p in model.named_parameters()})


def _parallel_values(rank: int) -> dict[str, Any]:
    model, x = _made()
    model = parallel(model, (("x", 2),))
    model(x)
    assert any(isinstance(p, DTensor) and not p.placements[0].is_replicate() for p in model.parameters())
    return _values(model, x)


def test_values_and_gradients_are_those_of_one_process(ranks: RankPool) -> None:
    wanted = _values(*_made())
    for found in ranks.run(_parallel_values, world=2):
        assert_close(found, wanted, 1e-12)
