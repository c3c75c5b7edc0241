"""Where a program meets its caller: which tensors are whole, which are shards, and how to change one
into the other without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.sharding import shard_of
from cost_model.mesh import MeshSpec
from passes.ir.torch_dtensor import local_of
from passes.layout.layout import Layout
from passes.layout.placements import layout_to_placements

__all__ = [
    "InputSide",
    "OutputSide",
    "Returned",
    "conform",
    "expected",
    "plain_input",
    "sliced",
    "wrapped_output",
]

Returned = Literal["global", "local", "dtensor"]


@dataclass(frozen=True)
class InputSide:
    """One input of a program other than a tangent.

    shape:  global.
    layout: of the graph's placeholder. A plain tensor of the global shape is sliced to it; one of this
            rank's local shape is taken as the shard; a DTensor is redistributed.
    """

    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class OutputSide:
    """One tensor output of a call, by its index. shape: global. layout: as the graph returns it.

    returned: "global" (the layout is replicated) and "local" hand the tensor out as it is; "dtensor"
              wraps it.
    mesh: of the ranks that have it; None: all.
    """

    shape: tuple[int, ...]
    layout: Layout
    returned: Returned = "global"
    mesh: DeviceMesh | None = None


def plain_input(value: Tensor, side: InputSide, mesh: DeviceMesh, spec: MeshSpec) -> Tensor:
    """A DTensor argument of a call as this rank's shard in the wanted layout (differentiable)."""
    if not isinstance(value, DTensor):
        return value
    wanted = layout_to_placements(side.layout, spec)
    return value.redistribute(mesh, wanted).to_local()


def sliced(value: Tensor, side: InputSide, spec: MeshSpec, rank: int) -> Tensor:
    """This rank's shard of `value`, which is whole or the shard already: told by its shape."""
    if tuple(value.shape) == side.layout.local_shape(side.shape, spec, rank):
        return value
    return shard_of(value, side.layout, spec, rank)


def wrapped_output(value: Tensor, side: OutputSide, mesh: DeviceMesh, spec: MeshSpec) -> Tensor:
    """An output as the caller wants it (differentiable)."""
    if side.returned != "dtensor":
        return value
    stride = torch.empty(side.shape, device="meta").stride()
    placements = layout_to_placements(side.layout, spec)
    return DTensor.from_local(
        value, side.mesh or mesh, placements, run_check=False, shape=torch.Size(side.shape), stride=stride
    )


def conform(value: Tensor, like: Tensor) -> Tensor:
    """`value` with the strides and dtype of `like`, which has its shape; itself if it has them."""
    value = local_of(value)
    if value.stride() == like.stride() and value.dtype == like.dtype:
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=value.device).copy_(value)


def expected(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Shapes, strides and dtypes alone (meta tensors) of a graph's placeholders."""
    return tuple(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in values)
