"""Which part of a tensor each rank holds: placements and, if asked for, explicit sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autoshard.plan.find_plan import mesh_spec
from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group
from cost_model.checked_arguments import checked_count, reject
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout, Span
from passes.layout.placements import placements_to_layout

Placements = Placement | Sequence[Placement]
"""One per mesh axis; on a mesh of one axis also alone."""

Sizes = Mapping[int, Sequence[int]]
"""Tensor dim -> length of each part, by linear index over the mesh axes that split it, major first."""


def member(mesh: DeviceMesh) -> tuple[MeshSpec, int]:
    """(the mesh by names and sizes, this rank). ShardingError on a rank that is not in the mesh."""
    if isinstance(mesh, MeshSpec):
        raise ShardingError(
            "mesh is a MeshSpec, which has no processes to run on\n  try: init_device_mesh(...)"
        )
    spec = mesh_spec(mesh)
    if mesh.get_coordinate() is None:
        raise ShardingError(
            f"rank {mesh.get_rank()} is not in {spec}\n  try: call this on the ranks of the mesh only"
        )
    return spec, mesh.get_rank()


def part_layout(
    placements: Sequence[Placement], shape: Sequence[int], mesh: MeshSpec, sizes: Sizes | None, *, what: str
) -> Layout:
    """The layout of a tensor of global `shape`: torch.chunk sizes, or those in `sizes`.

    Raises ShardingError, naming the tensor as `what`, for placements that do not fit, a pending reduction,
    or sizes that are not one per part or do not add up to the dim.
    """
    layout = placements_to_layout(placements, shape, mesh, what=what)
    return sized(refuse_partial(layout, what), shape, mesh, sizes, what)


def checked_sizes(sizes: object) -> Sizes | None:
    """`sizes` if it is one; ShardingError for anything else. Whether it fits a tensor is another question."""
    if sizes is None:
        return None
    if not isinstance(sizes, Mapping):
        raise reject("sizes", sizes, "{dim: [length of each part]}")
    found: dict[int, list[int]] = {}
    for dim, parts in sizes.items():
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise reject("a dim in sizes", dim, "{dim: [length of each part]}")
        if not isinstance(parts, (list, tuple)):
            raise reject(f"sizes[{dim}]", parts, "a list, the length of each part")
        found[dim] = [checked_count(part, f"sizes[{dim}][{i}]") for i, part in enumerate(parts)]
    return found


def sized(layout: Layout, shape: Sequence[int], mesh: MeshSpec, sizes: Sizes | None, what: str) -> Layout:
    """`layout` with the given sizes. ShardingError if they do not fit."""
    given: list[tuple[int, ...] | None] = [None] * len(shape)
    for dim, parts in (sizes or {}).items():
        if not -len(shape) <= dim < len(shape):
            raise ShardingError(
                f"sizes has dim {dim}; {what} has {len(shape)} dims {tuple(shape)}\n"
                f"  try: 0 <= dim < {len(shape)}"
            )
        given[dim] = _checked_sizes(tuple(parts), dim % len(shape), shape, layout, mesh, what)
    return Layout.of(shape, mesh, layout.dims, (), given)


def refuse_partial(layout: Layout, what: str) -> Layout:
    """`layout` itself; ShardingError if it has a pending reduction."""
    if layout.partial:
        raise ShardingError(
            f"{what} is Partial over axis {layout.partial[0][0]!r}; data is split or replicated\n"
            "  try: Shard(dim) or Replicate()"
        )
    return layout


def _checked_sizes(
    parts: tuple[int, ...], dim: int, shape: Sequence[int], layout: Layout, mesh: MeshSpec, what: str
) -> tuple[int, ...]:
    count = mesh.size(*layout.dims[dim])
    if len(parts) != count:
        axes = ", ".join(map(repr, layout.dims[dim])) or "no axis"
        raise ShardingError(
            f"sizes[{dim}] has {len(parts)} parts {list(parts)}; dim {dim} of {what} is split over {axes}, "
            f"into {count}\n  try: one size per part, or a placement that splits the dim"
        )
    if min(parts) < 0 or sum(parts) != shape[dim]:
        raise ShardingError(
            f"sizes[{dim}] = {list(parts)} adds up to {sum(parts)}; dim {dim} of {what} is {shape[dim]} long\n"
            "  try: sizes >= 0 that add up to the length of the dim"
        )
    return parts


def spans_of(layout: Layout, shape: Sequence[int], mesh: MeshSpec, rank: int) -> tuple[Span, ...]:
    """What `rank` holds of every dim, in global coordinates."""
    return tuple(layout.interval(shape, mesh, dim, rank) for dim in range(len(shape)))


def checked_plain(value: object, what: str) -> Tensor:
    """`value` if it is a plain tensor with data; else ShardingError."""
    if isinstance(value, DTensor):
        raise ShardingError(
            f"{what} is a DTensor, which knows its parts\n  try: redistribute(), full_tensor() or to_local()"
        )
    if not isinstance(value, torch.Tensor) or value.is_meta:
        kind = "on meta" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ShardingError(f"{what} is {kind}\n  try: a torch.Tensor with data")
    return value


@torch.no_grad()
def weighted_mean(value: Tensor | float, weight: float, mesh: DeviceMesh) -> Tensor:
    """sum(value * weight) / sum(weight) over all ranks, in float64, on every rank; by one all-reduce.

        accuracy = autoshard.weighted_mean(correct / max(rows, 1), rows, mesh)

    For metrics made of each rank's own part outside the model: a mean of the ranks' means is wrong where
    parts differ in size. A mean *in* the model is that of the global tensor already.

    value:  of the same shape on all ranks; ranks that hold the same part count alike, which changes
            nothing. Gradients do not flow back.
    weight: how many elements the value is the mean of. With 0 the value is left out, even if it is nan;
            0 on all ranks gives nan.
    """
    member(mesh)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        raise reject("weight", weight, "how many elements the value is the mean of, at least 0")
    if not isinstance(value, (int, float, Tensor)) or (isinstance(value, Tensor) and value.is_complex()):
        raise reject("value", value, "a number, or a tensor of real ones")
    mine = _sent(value, local_device(mesh))
    weighed = mine * weight if weight else torch.zeros_like(mine)
    total = torch.cat([weighed.reshape(-1), weighed.new_full((1,), weight)])
    torch.distributed.all_reduce(total, group=whole_group(mesh))
    return (total[:-1] / total[-1]).view(mine.shape)


def _sent(value: Tensor | float, device: torch.device) -> Tensor:
    """In float64 on `device`, without waiting for it."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)
