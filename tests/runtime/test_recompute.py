"""Training within a memory limit on real processes: what is computed again changes no loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoshard import MeshSpec, ShardingError, find_plan
from tests.api.programs import Axes, assert_close, full, parallel
from tests.profiles import slow_compute
from tests.ranks import RankPool

LINE: Axes = (("x", 2),)
WIDTH, ROWS = 8, 96


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.1, self.training)
        return x.square().mean()


def deep() -> tuple[Deep, Tensor]:
    torch.manual_seed(0)
    return Deep().double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)


def steps(model: nn.Module, x: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(4):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(full(loss)))
    return losses


def training(rank: int, limit: int | None) -> tuple[list[float], dict[str, Tensor], int]:
    model, x = deep()
    torch.manual_seed(1)
    parallel(model, LINE, (x,), memory_limit=limit)
    return steps(model, x), full(model.state_dict()), len(model.autoshard_plan.planned.again)


def test_a_limit_changes_no_loss(ranks: RankPool) -> None:
    model, x = deep()
    peak = find_plan(model, MeshSpec({"x": 2}), (x,), profile=slow_compute(), backend="eager").peak_memory
    wanted = ranks.run(training, None, world=2)
    found = ranks.run(training, int(0.8 * peak), world=2)
    assert wanted[0][2] == 0
    for (losses, state, again), (one, other, _) in zip(found, wanted, strict=True):
        assert again > 0
        assert_close((losses, state), (one, other), 1e-12)


def refused(rank: int) -> str:
    model, x = deep()
    try:
        parallel(model, LINE, (x,), recompute="all")
    except ShardingError as error:
        return str(error)
    return "accepted"


def test_another_word_is_an_error_on_all_ranks(ranks: RankPool) -> None:
    replies = ranks.run(refused, world=2)
    assert all("recompute is 'all'" in reply and "try: " in reply for reply in replies)
