"""Resuming: dropout goes on, and a rank killed while saving leaves the last checkpoint whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
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


BAD: list[tuple[Any, Any, Any]] = [
    *((root, 1, None) for root in (3, b"\0", "a\0b")),
    *(("", step, None) for step in (1.0, True, "1", -1, None, 2**80)),
    *(("", 1, keep) for keep in (0, True, 1.0)),
]


def bad_arguments(rank: int, root: str) -> list[str]:
    mesh, said = device_mesh(LINE), list[str]()
    for place, step, keep in BAD:
        given = f"{root}{place}" if isinstance(place, str) else place
        with pytest.raises(ShardingError) as caught, autoshard.new_checkpoint(given, step, mesh, keep=keep):
            pass
        said.append(str(caught.value))
    with pytest.raises(AutoshardError) as caught, autoshard.new_checkpoint(root, rank, mesh):
        pass
    said.append(str(caught.value))
    with autoshard.new_checkpoint(root, np.int64(3), mesh):  # type: ignore[arg-type]
        pass
    (Path(root) / "file").touch()
    dist.barrier()
    for use in (
        autoshard.last_checkpoint,
        lambda root, mesh: autoshard.new_checkpoint(root, 1, mesh).__enter__(),
    ):
        with pytest.raises(ShardingError) as caught:
            use(f"{root}/file", mesh)
        said.append(str(caught.value))
    return said


def test_arguments_are_checked_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(bad_arguments, str(tmp_path), world=2):
        for text, (place, step, _) in zip(said, BAD, strict=False):
            name = "root" if place else "keep" if type(step) is int and step == 1 else "step"
            assert text.startswith(f"{name} is ") and "\n  try: " in text
        assert "on rank 1" in said[len(BAD)] and "step-1" in said[len(BAD)]
        assert all("file" in text and "\n  try: " in text for text in said[len(BAD) + 1 :])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step-3"]


def two_runs(rank: int, root: str) -> str:
    """Two runs on one root, at another step and at the same."""
    mesh = device_mesh(LINE)
    with autoshard.new_checkpoint(root, 3, mesh) as first:
        (first / f"of-rank-{rank}").touch()
        with autoshard.new_checkpoint(root, 5, mesh):
            pass
        with pytest.raises(ShardingError) as again, autoshard.new_checkpoint(root, 3, mesh):
            pass
    # A run that goes on from an earlier step keeps what it saves.
    with autoshard.new_checkpoint(root, 2, mesh, keep=1):
        pass
    return str(again.value)


def test_a_second_run_leaves_the_first_one_s_folder(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "step-old.partial").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    for name in ("step-1", "step-3.partial", "step-9.partial"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    for text in ranks.run(two_runs, str(tmp_path), world=2):
        assert text.startswith("step-3 is being saved by another run")
    names = ["elsewhere", "step-2", "step-9.partial", "step-old.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "elsewhere" / "kept").exists() and not list((tmp_path / "step-2").iterdir())


def one_raises(rank: int, root: str) -> None:
    with autoshard.new_checkpoint(root, 1, device_mesh(LINE)):
        if rank == 0:
            raise KeyError("no such key")
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_raises_while_others_save(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks.run(one_raises, str(tmp_path), world=2)
    assert "KeyError: 'no such key'" in caught.value.errors[0]
    error = caught.value.errors[1].partition("RankError: ")[2]
    assert "rank 0: turn 4, the end of new_checkpoint (it raised KeyError: 'no such key')" in error
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.partial"]
