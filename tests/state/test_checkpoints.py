"""Resuming: dropout goes on, and a rank killed while saving leaves the last checkpoint whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import autoshard
from cost_model.errors import AutoshardError, ShardingError
from tests.api.programs import Axes, device_mesh, parallel
from tests.ranks import RankFailure, RankPool

LINE: Axes = (("x", 2),)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 40)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.up(x), 0.5, True).sum(1)


def dropped(first_call: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    x = torch.ones(4, 10)
    return parallel(Dropped(), LINE, (x,) if first_call else None), x


def stopped(rank: int, root: str) -> list[float]:
    """Saves after two calls; returns the third."""
    model, x = dropped(first_call=True)
    for _ in range(2):
        model(x)
    assert list(model.state_dict()) == ["up.weight", "up.bias"]
    state = {"model": get_model_state_dict(model), "random": autoshard.random_state(model)}
    with autoshard.new_checkpoint(root, 2, device_mesh(LINE)) as folder:
        dcp.save(state, checkpoint_id=folder)
    return model(x).tolist()


def resumed(rank: int, root: str) -> tuple[list[float], list[float]]:
    """The third call, of a model that was planned, and of one that was not."""
    found: list[list[float]] = []
    for first_call in (True, False):
        model, x = dropped(first_call)
        state: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "random": autoshard.random_state(model),
        }
        folder = autoshard.last_checkpoint(root, device_mesh(LINE))
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        found.append(model(x).tolist())
    return found[0], found[1]


def test_dropout_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    third = ranks.run(stopped, str(tmp_path), world=2)
    assert third[0] == third[1]
    assert len(set(third[0])) > 1  # the numbers are random: rows of the same input differ
    for got in ranks.run(resumed, str(tmp_path), world=2):
        assert got == (third[0], third[0])


def values(step: int) -> Tensor:
    return torch.arange(8.0) + 100 * step


def saving(rank: int, root: str, steps: int, dies_at: int | None) -> None:
    mesh = device_mesh(LINE)
    for step in range(steps):
        with autoshard.new_checkpoint(root, step, mesh, keep=2) as folder:
            dcp.save({"x": distribute_tensor(values(step), mesh, [Shard(0)])}, checkpoint_id=folder)
            if step == dies_at and rank == 1:
                os._exit(9)


def loaded(rank: int, root: str) -> tuple[str, Tensor]:
    mesh = device_mesh(LINE)
    folder = autoshard.last_checkpoint(root, mesh)
    assert folder is not None
    state: dict[str, Any] = {"x": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    dcp.load(state, checkpoint_id=folder)
    assert isinstance(state["x"], DTensor)
    return folder.name, state["x"].full_tensor()


def refused(rank: int, root: str) -> list[str]:
    mesh = device_mesh(LINE)
    said: list[str] = []
    with pytest.raises(ShardingError) as again, autoshard.new_checkpoint(root, 2, mesh):
        pass
    said.append(str(again.value))
    with pytest.raises((AutoshardError, ValueError)) as failed, autoshard.new_checkpoint(root, 7, mesh):
        if rank == 0:
            raise ValueError("no space")
    said.append(str(failed.value))
    return said


def test_killed_while_saving(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    with pytest.raises(RankFailure):
        ranks.run(saving, str(root), 5, 3, world=2)
    assert sorted(path.name for path in root.iterdir()) == ["step-1", "step-2", "step-3.partial"]
    for name, got in ranks.run(loaded, str(root), world=2):
        assert name == "step-2"
        torch.testing.assert_close(got, values(2))
    first, second = ranks.run(refused, str(root), world=2)
    assert first[0].startswith("step-2 is saved already") and second[0].startswith(first[0])
    assert first[1] == "no space" and "rank 0 failed: ValueError: no space" in second[1]
