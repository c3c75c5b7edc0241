"""A checkpoint of a model in four stages goes on without stages, on a square mesh, and in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.api.programs import Axes, assert_close, full, parallel
from tests.ranks import RankPool
from tests.stages.stage_models import Mlp

FOUR: Axes = (("pp", 4),)
SQUARE: Axes = (("dp", 2), ("tp", 2))
LATER: Axes = (("dp", 2), ("pp", 2))


def built() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    draw = lambda width: torch.randn(8, width, generator=generator, dtype=torch.float64)
    return Mlp().double(), (draw(6), draw(3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    loss = model(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(full(loss))


def run(folder: str, axes: Axes | None, *, steps: int, load: bool, **options: Any) -> list[float]:
    """axes: None for one process. The losses; what is there after them is saved, if it was not loaded before."""
    model, batch = built()
    if axes is not None:
        parallel(model, axes, batch, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if load:
        mine, its = get_state_dict(model, optimizer)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({"model": mine, "optimizer": its}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=mine, optim_state_dict=its)
    losses = [step(model, optimizer, batch) for _ in range(steps)]
    if not load:
        mine, its = get_state_dict(model, optimizer)
        dcp.save({"model": mine, "optimizer": its}, checkpoint_id=folder)
    return losses


def on_meshes(rank: int, folder: str) -> list[list[float]]:
    return [
        run(folder, FOUR, steps=3, load=False, stages="pp", micro_batches=4),
        run(folder, SQUARE, steps=2, load=True),
        run(folder, LATER, steps=2, load=True, stages="pp", micro_batches=2),
    ]


def test_training_goes_on_wherever_it_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    model, batch = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = [step(model, optimizer, batch) for _ in range(5)]
    for first, square, later in ranks.run(on_meshes, str(tmp_path), world=4):
        assert_close(first, wanted[:3], 1e-11)
        assert_close(square, wanted[3:], 1e-11)
        assert_close(later, wanted[3:], 1e-11)
    assert_close(run(str(tmp_path), None, steps=2, load=True), wanted[3:], 1e-11)
