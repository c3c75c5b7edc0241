"""The demo's model made parallel by hand, with stock PyTorch: what autoshard is measured beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Make = Callable[[nn.Module, DeviceMesh], nn.Module]
"""Makes the demo's GPT parallel, in place."""


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in cast(Any, model.blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron's: attention by heads, the MLP by columns and rows; all else on every rank."""
    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, ParallelStyle] = {
        "query_key_value": column(),
        "projection": row(),
        "up": column(),
        "down": row(),
    }
    for block in cast(Any, model.blocks):
        parallelize_module(block, mesh, plan)
        block.heads //= mesh.size()  # a rank sees its own
    return model


RIVALS: dict[str, tuple[Make, bool]] = {
    "DDP": (data_parallel, True),
    "FSDP2": (fully_sharded, True),
    "tensor parallel by hand": (tensor_parallel, False),
}
"""Name -> how the model is made parallel, and whether each rank passes a part of the batch."""
