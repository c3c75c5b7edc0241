"""Ring attention, and a window's halo, on ranks: a sequence in parts is trained on as one process does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import MeshSpec, find_plan
from passes.layout.layout import RING
from tests.api.programs import full, parallel
from tests.profiles import slow_compute
from tests.ranks import RankPool

TOKENS = 48


class OneHead(nn.Module):
    """A word sees all words before it, or the last `window`."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)[:, None].chunk(3, -1)
        how: dict[str, Any] = {"is_causal": True}
        if self.window:
            how = {"attn_mask": torch.ones(TOKENS, TOKENS).bool().tril().triu(1 - self.window)}
        return self.out(F.scaled_dot_product_attention(q, k, v, **how)[:, 0]).pow(2).mean()


def _options(backend: str) -> dict[str, Any]:
    """Prices by which products alone take time."""
    profile = slow_compute()
    device = replace(profile.device, memory_bytes_per_second=1e15)
    placed = ((Shard(1),),)
    return {"profile": replace(profile, device=device), "in_placements": placed, "backend": backend}


def _losses(rank: int, ranks: int, backend: str, window: int) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model: nn.Module = OneHead(window).double()
    if ranks > 1:
        model = parallel(model, (("cp", ranks),), (_part(0, rank, ranks),), tune="first", **_options(backend))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(_part(step, rank, ranks))
        loss.backward()
        optimizer.step()
        losses.append(float(full(loss)))
    return losses, [full(parameter) for parameter in model.parameters()]


def _part(step: int, rank: int, ranks: int) -> Tensor:
    whole = torch.randn(1, TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return whole.chunk(ranks, 1)[rank].contiguous()


@pytest.mark.parametrize(
    ("backend", "count", "window"),
    [
        ("eager", 2, 0),
        pytest.param("eager", 4, 0, marks=pytest.mark.slow),
        pytest.param("inductor", 4, 0, marks=pytest.mark.slow),
        ("eager", 2, 10),
        pytest.param("inductor", 4, 18, marks=pytest.mark.slow),
    ],
)
def test_trained_as_one_process(ranks: RankPool, backend: str, count: int, window: int) -> None:
    plan = find_plan(
        OneHead(window).double(), MeshSpec({"cp": count}), (_part(0, 0, count),), **_options(backend)
    )
    split = [split.factor for r in plan.records if "attention" in r.op for split in r.splits]
    assert split == ["s" if window else RING] * 2
    wanted, parameters = _losses(0, 1, backend, window)
    for losses, found in ranks.run(_losses, count, backend, window, world=count):
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, parameters, rtol=1e-11, atol=1e-12)
