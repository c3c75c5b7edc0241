"""A network split by space, batch and parameter shards at once: saved on one mesh, loaded on others and on none."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import autoshard
from passes.layout.layout import NodeLayouts
from passes.rules.core.rule import OpRule
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.spatial.restricted import restricted

SQUARE, LINE = (2, 2), (3,)
Found = tuple[dict[str, Tensor], Tensor]
"""Full parameters and buffers, and the output in eval mode."""


def network() -> nn.Module:
    """Filters that neither 2 nor 3 divide."""
    return nn.Sequential(
        nn.Conv2d(2, 7, 3, padding=1, bias=False), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 2, 4, 2, 1)
    )


def images() -> Tensor:
    return torch.randn(4, 2, 13, 9, generator=torch.Generator().manual_seed(0))


def found(model: nn.Module) -> Found:
    """The state is read first: eval must find what training left."""
    state = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        output = model(images())
    return {name: tensor.clone() for name, tensor in state.items()}, output


def trained(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(images()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parallel(sizes: tuple[int, ...], factors: Sequence[str]) -> nn.Module:
    """On every axis the filters are stored split, as FSDP does, or (the last ones) whole."""
    model = network()
    names = ("a", "b")[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    pins = {"*": [Shard(0)] * len(sizes), "3.bias": [Replicate()] * len(sizes)}

    def splits_just_these(rule: OpRule, shapes: Any, strategy: NodeLayouts) -> bool:
        return {split.factor for split in strategy.splits} == set(factors)

    with restricted(splits_just_these):
        autoshard(model, mesh, (images(),), profile=slow_compute(), backend="eager", constraints=pins)
    plan: Any = model.autoshard_plan
    assert set(factors) in [{s.factor for s in layouts.splits} for layouts in plan.planned.layouts.values()]
    return model


def save(rank: int, folder: str) -> tuple[Found, dict[str, Any]]:
    torch.manual_seed(0)
    model = parallel(SQUARE, ("n", "y0"))
    assert any(isinstance(p, DTensor) and p.placements[0].is_shard() for p in model.parameters())
    trained(model)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return found(model), gathered


def load(rank: int, folder: str) -> Found:
    torch.manual_seed(17)  # other weights than those saved
    model = parallel(LINE, ("y1",))
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    return found(model)


def test_saved_on_a_square_loaded_on_a_line_and_alone(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = network()
    trained(alone)
    wanted = found(alone)
    folder = str(tmp_path / "checkpoint")
    saved = ranks.run(save, folder, world=4)
    for got in [*(run for run, _ in saved), *ranks.run(load, folder, world=3)]:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    # The same files, and the gathered state of rank 0, in a plain process.
    for state in (dcp_state(folder), saved[0][1]):
        plain = network()
        plain.load_state_dict(state)
        torch.testing.assert_close(found(plain), saved[0][0], rtol=1e-5, atol=1e-6)


def dcp_state(folder: str) -> dict[str, Tensor]:
    state = {"model": network().state_dict()}
    with warnings.catch_warnings(action="ignore"):  # that no process group is there
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["model"]
