"""Cut a whole tensor to this rank's shard, or receive the shard from rank 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout

__all__ = ["distributed", "like_parameter", "shard_of"]

_PIECE_BYTES = 64 << 20


def shard_of(whole: Tensor, layout: Layout, mesh: MeshSpec, rank: int) -> Tensor:
    """The part of `whole` (global shape) that `rank` holds: a view, unless it wraps around an end."""
    part = whole
    for dim, length in enumerate(whole.shape):
        lo, hi = layout.interval(whole.shape, mesh, dim, rank)
        if lo < 0 or hi > length:
            places = torch.arange(lo, hi, device=whole.device) % length
            part = part.index_select(dim, places)
        elif (lo, hi) != (0, length):
            part = part.narrow(dim, lo, hi - lo)
    return part


def distributed(
    whole: Tensor,
    mesh: DeviceMesh,
    placed: Sequence[Placement],
    layout: Layout,
    spec: MeshSpec,
    *,
    from_first: bool,
) -> DTensor:
    """A DTensor of `whole`; of rank 0's values if `from_first`, else each rank cuts its own."""
    rank = mesh.get_rank()
    device = torch.device("meta") if whole.is_meta else local_device(mesh)
    if from_first:
        local = _received(whole, layout, spec, mesh)
    else:
        # A copy always: a view would keep the whole tensor alive.
        part = shard_of(whole, layout, spec, rank)
        local = torch.empty(part.shape, dtype=part.dtype, device=device)
        local.copy_(part)
    return DTensor.from_local(
        local, mesh, placed, run_check=False, shape=whole.shape, stride=_contiguous_stride(whole.shape)
    )


def _received(whole: Tensor, layout: Layout, spec: MeshSpec, mesh: DeviceMesh) -> Tensor:
    """This rank's shard of rank 0's `whole`, broadcast in slabs of dim 0 of at most _PIECE_BYTES."""
    rank, device, group = mesh.get_rank(), local_device(mesh), whole_group(mesh)
    if whole.ndim == 0:
        value = whole.to(device, copy=True)
        dist.broadcast(value, 0, group=group)
        return value
    shape = layout.local_shape(whole.shape, spec, rank)
    local = torch.empty(shape, dtype=whole.dtype, device=device)
    first, last = layout.interval(whole.shape, spec, 0, rank)
    row_bytes = max(1, math.prod(whole.shape[1:]) * whole.element_size())
    step = max(1, _PIECE_BYTES // row_bytes)
    inner = Layout(((), *layout.dims[1:]), (), (None, *layout.sizes[1:]))
    for start in range(0, whole.shape[0], step):
        stop = min(start + step, whole.shape[0])
        slab = whole[start:stop].to(device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(slab, 0, group=group)
        lo, hi = max(start, first), min(stop, last)
        if lo < hi:
            local[lo - first : hi - first] = shard_of(slab, inner, spec, rank)[lo - start : hi - start]
    return local


def like_parameter(whole: Tensor, parameter: Tensor) -> DTensor:
    """`whole`, the same on all ranks, with the mesh and placements of the DTensor `parameter`."""
    assert isinstance(parameter, DTensor)
    mesh, placed = parameter.device_mesh, parameter.placements
    spec = MeshSpec.of(mesh)
    layout = placements_to_layout(placed, whole.shape, spec, what="a gradient")
    return distributed(whole, mesh, placed, layout, spec, from_first=False)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(1, shape[dim + 1])
    return tuple(stride)
