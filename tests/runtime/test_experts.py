"""Mixtures of experts on ranks: tokens, experts and widths split, trained as one process trains them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, find_plan
from tests.api.programs import full, parallel
from tests.lower.test_own_rows import Experts as RoutedExperts
from tests.lower.test_own_rows import wire
from tests.profiles import slow_compute
from tests.ranks import RankPool

WIDTH, EXPERTS = 8, 6


class Experts(nn.Module):
    """The two best of six experts for each token, gated, in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, which = self.router(rows).softmax(-1).topk(2)
        found, order = which.flatten().sort()
        ends = F.one_hot(found, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(rows[order // 2], self.up, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends) * weights.flatten()[order, None]
        return (x + y[order.argsort()].unflatten(0, (*x.shape[:2], 2)).sum(2)).pow(2).mean()


class Looked(Experts):
    """The same by looking up each row's matrices: torch has no grouped product of float64."""

    def forward(self, x: Tensor) -> Tensor:
        weights, which = self.router(x).softmax(-1).topk(2)
        gate, up = (x[:, :, None, None, :] @ self.up[which]).squeeze(-2).chunk(2, -1)
        y = ((F.silu(gate) * up).unsqueeze(-2) @ self.down[which]).squeeze(-2) * weights[..., None]
        return (x + y.sum(2)).pow(2).mean()


def _losses(rank: int, axes: Any, pins: Any, **options: Any) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model: nn.Module = (Experts if axes else Looked)().double()
    if axes:
        model = parallel(model, axes, (_batch(0),), constraints=pins, **{"tune": "first", **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = model(_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(full(loss)))
    return losses, [full(parameter) for parameter in model.parameters()]


def _batch(step: int) -> Tensor:
    return torch.randn(5, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rows_are_those_of_own_experts(ranks: RankPool, backend: str) -> None:
    """Experts are split where that pays; each batch sends other numbers of rows."""
    model, options = Experts().double(), {"profile": slow_compute(1), "backend": backend, "tune": "off"}
    pins = {"up": [Shard(0)], "down": [Shard(0)]}
    plan = find_plan(
        model, MeshSpec({"ep": 2}), (_batch(0),), constraints=pins, profile=slow_compute(1), backend=backend
    )
    products = [node for node in plan.planned.nodes if node.op == "routed_mm"]
    assert all(product.results[0].layout.partial == (("ep", "routed"),) for product in products)
    wanted, parameters = _losses(0, (), None)
    for losses, found in ranks.run(partial(_losses, **options), (("ep", 2),), pins, world=2):
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
        for got, alone in zip(found, parameters, strict=True):
            torch.testing.assert_close(got, alone, rtol=1e-10, atol=1e-11)


def _parts(rank: int, chosen: int, backend: str) -> tuple[list[float], list[Tensor], set[str]]:
    """Of a rank that has its part of each batch; rank -1: of one process."""
    torch.manual_seed(0)
    model: nn.Module = RoutedExperts(12 // chosen, chosen).double()
    dim, steps = chosen - 1, set[str]()
    batch = lambda step: torch.randn(4, 4, 7, dtype=torch.float64, generator=seeded(step))
    mine = lambda step: batch(step) if rank < 0 else batch(step).chunk(2, dim)[rank]
    if rank >= 0:
        options = {"in_placements": [Shard(dim)], "profile": wire(), "backend": backend, "tune": "first"}
        pins = {"up": [Shard(0)], "down": [Shard(0)]}
        model = parallel(model, (("ep", 2),), (mine(0),), constraints=pins, **options)
        steps = {step.name for step in model.autoshard_plan.collectives}  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = list[float]()
    for step in range(6):
        optimizer.zero_grad()
        loss = model(mine(step))
        loss.backward()
        optimizer.step()
        losses.append(float(full(loss)))
    return losses, [full(parameter) for parameter in model.parameters()], steps


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rows_alone_travel(ranks: RankPool, backend: str, chosen: int) -> None:
    """There with one expert a token, and back with two; each step other numbers of them."""
    wanted, parameters, _ = _parts(-1, chosen, backend)
    for losses, found, steps in ranks.run(_parts, chosen, backend, world=2):
        assert {1: "send_rows", 2: "return_rows"}[chosen] in steps
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
        for got, alone in zip(found, parameters, strict=True):
            torch.testing.assert_close(got, alone, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("axes", "weights"),
    [
        ((("dp", 2), ("ep", 2)), [Replicate(), Shard(0)]),
        pytest.param((("ep", 4),), [Shard(0)], marks=pytest.mark.slow),
        pytest.param((("tp", 3),), [Shard(2)], marks=pytest.mark.slow),
    ],
    ids=["batch and experts", "experts", "width"],
)
def test_trained_as_one_process(ranks: RankPool, axes: Any, weights: list[Any]) -> None:
    wanted, parameters = _losses(0, (), None)
    pins = {"up": weights, "down": weights}
    world = 4 if len(axes) > 1 else axes[0][1]
    for losses, found in ranks.run(_losses, axes, pins, world=world):
        torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
        for got, alone in zip(found, parameters, strict=True):
            torch.testing.assert_close(got, alone, rtol=1e-10, atol=1e-11)
