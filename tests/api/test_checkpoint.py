"""torch.distributed.checkpoint saves a parallel model and loads it on another mesh, unpatched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from tests.api.programs import Axes, Normed, assert_close, data, full, normed, parallel, trained
from tests.ranks import RankPool

SQUARE: Axes = (("a", 2), ("b", 2))
LINE: Axes = (("x", 3),)
Result = tuple[list[float], dict[str, Tensor], list[str]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def alone() -> Result:
    """Three steps and two more, in one process."""
    model = normed()
    optimizer = adamw(model)
    losses = trained(model, optimizer, 5)
    return losses[3:], full(model.state_dict()), list(model.state_dict())


def save(rank: int, folder: str) -> list[str]:
    model = normed()
    parallel(model, SQUARE, (data()[0],))
    optimizer = adamw(model)
    trained(model, optimizer, 3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return list(model_state)


def load_and_go_on(rank: int, folder: str, axes: Axes | None) -> Result:
    torch.manual_seed(17)  # other weights than those saved
    model = Normed()
    if axes is not None:
        parallel(model, axes, (data()[0],))
        assert any(isinstance(p, DTensor) and p.placements[0].is_shard() for p in model.parameters())
    optimizer = adamw(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = trained(model, optimizer, 2)
    return losses, full(model.state_dict()), list(model.state_dict())


def test_saved_on_a_square_loaded_on_a_line(ranks: RankPool, tmp_path: Path) -> None:
    wanted = alone()
    folder = str(tmp_path / "checkpoint")
    assert ranks.run(save, folder, world=4) == [wanted[2]] * 4
    for got in ranks.run(load_and_go_on, folder, LINE, world=3):
        assert_close(got[:2], wanted[:2])
        assert got[2] == wanted[2]
    # The same files serve one plain process.
    (got,) = ranks.run(load_and_go_on, folder, None, world=1)
    assert_close(got[:2], wanted[:2])
