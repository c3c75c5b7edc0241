"""Parallel code of stock PyTorch, right and wrong, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autoshard import MeshSpec, RankError, ShardingError, VerifyReport, verify_parallel
from autoshard.verification.joined_pieces import MeanAxes, joined_errors
from tests.ranks import RankPool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model() -> nn.Module:
    return Model().double()


def loss_of_model() -> nn.Module:
    class WithLoss(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    return WithLoss().double()


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


TENSOR = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def tensor(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR)
    return model


def two_axes(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    tensor(model, mesh["tp"])
    return fsdp(model, mesh["dp"])


def sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    given = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
    plan = {
        "blocks.0": PrepareModuleInput(**given, use_local_output=False),
        **{
            f"blocks.{i}.{name}": style
            for i in range(2)
            for name, style in {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            }.items()
        },
    }  # fmt: skip
    return parallelize_module(model, mesh, plan)


def unreduced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The second block's products are never added up over the ranks."""
    parallelize_module(model, mesh, {f"blocks.{i}.up": ColwiseParallel() for i in range(2)})
    parallelize_module(model, mesh, {"blocks.0.down": RowwiseParallel()})
    down = model.blocks[1].down
    weight, bias = down.weight.chunk(2, 1)[dist.get_rank()], down.bias / 2.0
    down.forward = lambda x: nn.functional.linear(x, weight, bias)
    return model


def forgotten(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallelism without any reduction of gradients."""
    return model


def failing(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    raise ValueError("no such style")


def verified(
    rank: int,
    axes: dict[str, int],
    make: Callable[..., nn.Module],
    batch_axes: tuple[str, ...],
    make_model: Any = model,
) -> VerifyReport:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    x = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return verify_parallel(make_model, make, (x,), mesh=mesh, batch_axes=batch_axes)


@pytest.mark.parametrize(
    ("axes", "make", "batch_axes"),
    [
        # It imports the compiler.
        pytest.param({"dp": 2}, ddp, ("dp",), marks=pytest.mark.slow),
        ({"dp": 2}, fsdp, ("dp",)),
        ({"tp": 2}, tensor, ()),
        ({"tp": 2}, sequence, ()),
        ({"dp": 2, "tp": 2}, two_axes, ("dp",)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_right(
    ranks: RankPool, axes: dict[str, int], make: Callable[..., nn.Module], batch_axes: tuple[str, ...]
) -> None:
    reports = ranks.run(verified, axes, make, batch_axes, world=2 ** len(axes))
    assert all(report == reports[0] for report in reports)
    assert reports[0].ok and reports[0].max_error < 1e-12, reports[0]
    names = {f"grad {name}" for name, _ in model().named_parameters()}
    assert set(reports[0].errors) == names | {"output 0"}


def test_a_mean_over_the_batch(ranks: RankPool) -> None:
    report = ranks.run(verified, {"dp": 2}, fsdp, ("dp",), loss_of_model, world=2)[0]
    assert report.ok and report.max_error < 1e-12


def test_a_product_that_is_not_reduced(ranks: RankPool) -> None:
    """What a rank has is a summand: right as that, and what adds it to the residual stream is not."""
    report = ranks.run(verified, {"tp": 2}, unreduced, (), world=2)[0]
    assert not report.ok and report.first_divergence is not None
    assert report.first_divergence.node == "blocks.1"
    assert "blocks.1 = its output (Block): relative error" in str(report)


@pytest.mark.parametrize("make_model", [model, loss_of_model])
def test_gradients_that_are_not_reduced(ranks: RankPool, make_model: Any) -> None:
    """A loss that each rank has of its own rows is right: the model's is the mean."""
    report = ranks.run(verified, {"dp": 2}, forgotten, ("dp",), make_model, world=2)[0]
    assert not report.ok and report.errors["output 0"] < 1e-12
    assert report.first_divergence is not None
    assert (report.first_divergence.op, report.first_divergence.module) == ("its gradient", "a parameter")


def test_ways_to_put_pieces_together() -> None:
    """Rows over the first axis, summands over the second; and what is neither."""
    mesh = MeshSpec({"a": 2, "b": 2})
    value = torch.arange(8.0).reshape(4, 2)
    pieces = [value[:2] - 1.0, torch.ones(2, 2), value[2:] - 1.0, torch.ones(2, 2)]
    assert min(joined_errors(pieces, value, mesh, MeanAxes())) == 0.0
    pieces[3] = torch.zeros(2, 2)
    assert min(joined_errors(pieces, value, mesh, MeanAxes())) > 0.1


@pytest.mark.slow
def test_processes_are_started() -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    report = verify_parallel(model, tensor, (x,), mesh=MeshSpec({"tp": 2}))
    assert report.ok and report.max_error < 1e-12
    with pytest.raises(RankError, match="no such style"):
        verify_parallel(model, failing, (x,), mesh=MeshSpec({"tp": 2}))


def test_what_does_not_fit() -> None:
    x, mesh = torch.randn(3, 6, 8, dtype=torch.float64), MeshSpec({"dp": 2})
    for make, options, named in [
        (ddp, {"batch_axes": ("tp",)}, "batch_axes names 'tp'"),
        (ddp, {"batch_axes": ("dp",)}, "a batch of 3 rows does not divide"),
        (lambda model, mesh: model, {}, "try: functions at the top of a module"),
        (ddp, {"mesh": MeshSpec({"dp": 2}, "cuda")}, "starts processes on CPUs"),
    ]:
        with pytest.raises(ShardingError) as caught:
            verify_parallel(model, make, (x,), **{"mesh": mesh, **options})
        assert named in str(caught.value) and "\n  try: " in str(caught.value)
