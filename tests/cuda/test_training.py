"""Training on several GPUs is training on one: precisions, dropout, uneven and empty shards, a laptop's plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import autoshard
from tests.cuda.gpus import Axes, GpuPool, axes_of, gpu_mesh
from tests.cuda.programs import PRECISIONS, Precision, losses_of_training, prepared, relative_error, whole
from tests.cuda.test_one_gpu import laptop_plan
from tests.profiles import slow_compute

STEPS = 10
MESHES = [
    pytest.param(dims, marks=pytest.mark.cuda(gpus=2**dims), id=text)
    for dims, text in ((1, "(n)"), (2, "(2, n over 2)"), (3, "(2, 2, n over 4)"))
]


def trained(
    rank: int, name: str, precision: str, axes: Axes, seed: int, options: Mapping[str, Any], kwargs: Any
) -> dict[str, Any]:
    """The losses of this rank, and how many collectives its plan has."""
    kind = PRECISIONS[precision]
    model, inputs = prepared(name, kind, **kwargs)
    torch.manual_seed(seed)
    autoshard(model, gpu_mesh(axes), None, **{"profile": slow_compute(), **options})
    losses = losses_of_training(model, inputs, kind, STEPS)
    return {"losses": losses, "collectives": len(model.autoshard_plan.collectives)}


def trained_alone(name: str, kind: Precision) -> list[float]:
    model, inputs = prepared(name, kind, batch=8)
    return losses_of_training(model, inputs, kind, STEPS)


def world_of(axes: Axes) -> int:
    return math.prod(size for _, size in axes)


def worst(got: list[float], wanted: list[float]) -> float:
    """The largest relative difference of a step's losses; NaN counts as infinite."""
    errors = [abs(a - b) / abs(b) for a, b in zip(got, wanted, strict=True)]
    return max(math.inf if math.isnan(error) else error for error in errors)


def check(
    runs: list[dict[str, Any]], wanted: list[float], tolerance: float, note: Callable[..., None]
) -> None:
    assert runs[0]["collectives"] > 0
    assert all(run["losses"] == runs[0]["losses"] for run in runs), "the ranks' losses differ"
    error = worst(runs[0]["losses"], wanted)
    note("loss error", f"{error:.1e}")
    assert error <= tolerance


@pytest.mark.parametrize("dims", MESHES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_losses_are_those_of_one_gpu(
    gpus: GpuPool, name: str, precision: str, dims: int, record_property: Callable[..., None]
) -> None:
    axes = axes_of(dims)
    options = {"backend": "inductor" if precision == "bfloat16" else "eager"}
    runs = gpus.run(trained, name, precision, axes, 0, options, {"batch": 8}, world=world_of(axes))
    kind = PRECISIONS[precision]
    check(runs, trained_alone(name, kind), kind.tolerance, record_property)


@pytest.mark.cuda(gpus=2)
def test_a_plan_made_without_gpus_trains(
    gpus: GpuPool, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    axes = axes_of(1)
    text = ",".join(f"{name}={size}" for name, size in axes)
    laptop_plan("llama", "bfloat16", text, tmp_path / "plan.json")
    options = {"plan": str(tmp_path / "plan.json"), "profile": None}
    runs = gpus.run(trained, "llama", "bfloat16", axes, 0, options, {}, world=world_of(axes))
    kind = PRECISIONS["bfloat16"]
    model, inputs = prepared("llama", kind)
    check(runs, losses_of_training(model, inputs, kind, STEPS), kind.tolerance, record_property)


@pytest.mark.cuda(gpus=4)
def test_dropout_depends_on_the_seed_and_not_on_the_mesh(gpus: GpuPool) -> None:
    def run(dims: int, seed: int) -> list[float]:
        axes = axes_of(dims)
        kwargs = {"batch": 8, "dropout": 0.2}
        runs = gpus.run(
            trained, "gpt2", "float32", axes, seed, {"backend": "eager"}, kwargs, world=world_of(axes)
        )
        assert all(r["losses"] == runs[0]["losses"] for r in runs), "the ranks' losses differ"
        return runs[0]["losses"]

    first = run(1, 5)
    assert run(1, 5) == first
    assert worst(run(2, 5), first) <= PRECISIONS["float32"].tolerance
    assert worst(run(1, 6), first) > PRECISIONS["float32"].tolerance


class Uneven(nn.Module):
    """Rows that no number of GPUs divides: 33, 5, and 1, of which all ranks but the first hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.last = nn.Linear(10, 33), nn.Linear(33, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(F.gelu(self.up(x))).tanh())


UNEVEN_PINS = {f"{name}.weight": [Shard(0)] for name in ("up", "middle", "last")}


def uneven() -> tuple[Uneven, Tensor]:
    torch.manual_seed(0)
    return Uneven().cuda(), torch.randn(7, 10).cuda()


def uneven_step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    out = model(x)
    out.square().sum().backward()
    return {"out": whole(out), **{n: whole(p.grad) for n, p in model.named_parameters()}}


def uneven_on_rank(rank: int, axes: Axes, backend: str) -> dict[str, Any]:
    model, x = uneven()
    autoshard(model, gpu_mesh(axes), None, constraints=UNEVEN_PINS, profile=slow_compute(), backend=backend)
    values = uneven_step(model, x)
    rows = {n: p.to_local().shape[0] for n, p in model.named_parameters() if n in UNEVEN_PINS}
    return {"values": values, "rows": rows}


@pytest.mark.cuda(gpus=2)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_uneven_and_empty_shards(gpus: GpuPool, backend: str) -> None:
    axes = axes_of(1)
    world = world_of(axes)
    wanted = uneven_step(*uneven())
    runs = gpus.run(uneven_on_rank, axes, backend, world=world)
    assert [run["rows"]["last.weight"] for run in runs] == [1] + [0] * (world - 1)
    assert [sum(run["rows"][f"{name}.weight"] for run in runs) for name in ("up", "middle")] == [33, 5]
    for run in runs:
        for name, value in wanted.items():
            assert relative_error(run["values"][name], value) <= PRECISIONS["float32"].tolerance, name
