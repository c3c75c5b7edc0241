"""`scatter` and `gather`: a whole tensor on one rank, its parts on all; and `weighted_mean` over parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autoshard.data.rank_sampler import (
    Placements,
    Sizes,
    checked_sizes,
    member,
    refuse_partial,
    sized,
    spans_of,
)
from autoshard.global_call import joined
from autoshard.runtime.process_groups import local_device, whole_group
from autoshard.runtime.sharding import shard_of
from autoshard.watching.agreement import agree, collectively, everyones
from cost_model.errors import ShardingError, is_number, is_whole, reject, shown, type_of
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from passes.layout.placements import as_placements, placements_to_layout


def _open_group(mesh: DeviceMesh) -> None:
    """Every rank of the mesh calls it before the first message: torch allows point-to-point messages among
    a few ranks of a group only after all of them took part in something."""
    dist.broadcast(torch.zeros(1, device=local_device(mesh)), 0, group=whole_group(mesh))


def _message(way: Callable[..., object], value: Tensor, peer: int, mesh: DeviceMesh) -> None:
    """A contiguous `value` sent (`dist.isend`), or filled with what `peer` sends (`dist.irecv`)."""
    # A batch of one: alone, NCCL would open a communicator for every pair of ranks.
    batch = [dist.P2POp(way, _as_bytes(value), peer, whole_group(mesh))]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def _as_bytes(value: Tensor) -> Tensor:
    """The same memory: backends disagree on which dtypes they carry."""
    return value.view(-1).view(torch.uint8)


@torch.no_grad()
def scatter(
    tensor: Tensor | None,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    sizes: Sizes | None = None,
    source: int = 0,
) -> Tensor:
    """This rank's part of the tensor that rank `source` has: a plain tensor on the mesh's device.

        x = autoshard.scatter(whole if rank == 0 else None, mesh, [Shard(2)], sizes={2: [5, 7, 4]})
        loss = autoshard(model, mesh, (x,), in_placements=[Shard(2)])(x)

    tensor:     the global tensor on rank `source`, on any device; None on all others.
    placements: one per mesh axis, Shard or Replicate.
    sizes:      {dim: length of each part}, any >= 0; other dims get torch.chunk's.

    Every rank of the mesh calls it. A rank receives one message, just its part; `source` needs room for
    one part beside the whole. Gradients do not flow back. What can be wrong is found before data moves,
    and raises on all ranks: ShardingError, or PlanError where the ranks' arguments differ.
    """
    spec, rank = member(mesh)

    def checked() -> tuple[tuple[Placement, ...], str]:
        _check_holder(tensor, source, rank, spec)
        return as_placements(placements, spec, "placements"), _text(sizes)

    given, parts = collectively(mesh, checked)
    agree(mesh, {"source": str(source), "placements": str(given), "sizes": parts})
    kind = everyones(mesh, None if tensor is None else (tuple(tensor.shape), tensor.dtype))[source]
    assert kind is not None
    shape, dtype = kind
    layout = _part_layout(given, shape, spec, sizes, what="the tensor to scatter")
    shapes = [layout.local_shape(shape, spec, r) for r in range(spec.device_count)]
    rooms = [shapes[rank]] if tensor is None else [shapes[rank], _largest(shapes)]
    part, *spare = collectively(mesh, lambda: _empty(rooms, dtype, local_device(mesh)))
    _open_group(mesh)
    if tensor is not None:
        _deal(tensor, layout, spec, mesh, part, spare[0])
    elif part.numel():
        _message(dist.irecv, part, source, mesh)
    return part


def _deal(
    whole: Tensor, layout: Layout, spec: MeshSpec, mesh: DeviceMesh, part: Tensor, spare: Tensor
) -> None:
    """Every rank its part of `whole`, one after the other through `spare`; this rank's to `part`."""
    for rank in range(spec.device_count):
        piece = shard_of(whole, layout, spec, rank)
        if rank == mesh.get_rank():
            part.copy_(piece)
        elif piece.numel():
            _message(dist.isend, _room(spare, piece.shape).copy_(piece), rank, mesh)


@overload
def gather(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    target: None = None,
    device: torch.device | str | None = None,
) -> Tensor: ...
@overload
def gather(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    target: int,
    device: torch.device | str | None = None,
) -> Tensor | None: ...
@torch.no_grad()
def gather(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    target: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """The tensor of which every rank has its part, on rank `target` (None elsewhere) or on all: `scatter`
    undone.

    local:  this rank's part, of any size: the global shape is what the parts add up to. If several
            ranks hold the same part, one is read.
    device: where the global tensor is put together; default the mesh's. Parts pass one by one.

    Raises, on all ranks and before data moves, ShardingError or PlanError as `scatter` does.
    """
    spec, rank = member(mesh)

    def checked() -> tuple[Placement, ...]:
        _check_part(local, target, spec, device)
        return as_placements(placements, spec, "placements")

    given = collectively(mesh, checked)
    agree(mesh, {"target": str(target), "placements": str(given), "dtype": str(local.dtype)})
    shapes = everyones(mesh, tuple(local.shape))
    layout, shape = joined(given, shapes, spec, "the tensor to gather")
    refuse_partial(layout, "the tensor to gather")
    wanted = target in (None, rank)
    here = local_device(mesh)
    (spare,) = collectively(mesh, lambda: _empty([_largest(shapes)], local.dtype, here))
    (whole,) = collectively(mesh, lambda: _empty([shape if wanted else (0,)], local.dtype, device or here))
    _open_group(mesh)
    for owner in _owners(layout, shape, spec, target):
        piece = _room(spare, shapes[owner])
        if owner == rank:
            piece.copy_(local)
        _move(piece, owner, target, mesh)
        if wanted:
            shard_of(whole, layout, spec, owner).copy_(piece)
    return whole if wanted else None


def _owners(layout: Layout, shape: Sequence[int], spec: MeshSpec, target: int | None) -> list[int]:
    """One rank for every part that is not empty: `target` for its own."""
    owners: dict[object, int] = {}
    ranks = range(spec.device_count)
    for rank in ranks if target is None else [target, *ranks]:
        if math.prod(layout.local_shape(shape, spec, rank)):
            owners.setdefault(spans_of(layout, shape, spec, rank), rank)
    return sorted(owners.values())


def _move(piece: Tensor, owner: int, target: int | None, mesh: DeviceMesh) -> None:
    """`owner`'s piece into that of `target`, or of all."""
    rank = mesh.get_rank()
    if target is None:
        dist.broadcast(_as_bytes(piece), owner, group=whole_group(mesh))
    elif rank == owner != target:
        _message(dist.isend, piece, target, mesh)
    elif rank == target != owner:
        _message(dist.irecv, piece, owner, mesh)


def _check_holder(tensor: Tensor | None, source: int, rank: int, spec: MeshSpec) -> None:
    _check_rank(source, "source", spec)
    if rank == source:
        _checked_plain(tensor, f"tensor on rank {rank}, the source,")
    elif tensor is not None:
        raise ShardingError(
            f"rank {rank} passes a tensor; only that of rank {source}, the source, is scattered\n"
            "  try: None on the other ranks, or source=..."
        )


def _check_part(local: Tensor, target: int | None, spec: MeshSpec, device: object) -> None:
    if target is not None:
        _check_rank(target, "target", spec)
    _checked_plain(local, "local")
    try:
        known = device is None or torch.empty(0, device=device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, AssertionError, NotImplementedError):
        known = None
    if known is None:
        raise reject("device", device, "a device of this machine, such as 'cpu'")


def _check_rank(rank: int, name: str, spec: MeshSpec) -> None:
    if not is_whole(rank) or not 0 <= rank < spec.device_count:
        raise ShardingError(
            f"{name} is rank {shown(rank)}; {spec} has ranks 0 to {spec.device_count - 1}\n  try: one of these"
        )


def _text(sizes: Sizes | None) -> str:
    return str(sorted((checked_sizes(sizes) or {}).items()))


def _largest(shapes: Sequence[tuple[int, ...]]) -> tuple[int]:
    return (max(math.prod(shape) for shape in shapes),)


def _room(spare: Tensor, shape: Sequence[int]) -> Tensor:
    """The start of a flat buffer as a tensor of `shape`."""
    return spare[: math.prod(shape)].view(tuple(shape))


def _empty(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]


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
    if not is_number(weight) or not 0 <= weight < math.inf:
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


def _part_layout(
    placements: Sequence[Placement], shape: Sequence[int], mesh: MeshSpec, sizes: Sizes | None, *, what: str
) -> Layout:
    """The layout of a tensor of global `shape`: torch.chunk sizes, or those in `sizes`.

    Raises ShardingError, naming the tensor as `what`, for placements that do not fit, a pending reduction,
    or sizes that are not one per part or do not add up to the dim.
    """
    layout = placements_to_layout(placements, shape, mesh, what=what)
    return sized(refuse_partial(layout, what), shape, mesh, sizes, what)


def _checked_plain(value: object, what: str) -> Tensor:
    """`value` if it is a plain tensor with data; else ShardingError."""
    if isinstance(value, DTensor):
        raise ShardingError(
            f"{what} is a DTensor, which knows its parts\n  try: redistribute(), full_tensor() or to_local()"
        )
    if not isinstance(value, torch.Tensor) or value.is_meta:
        kind = "on meta" if isinstance(value, torch.Tensor) else type_of(value)
        raise ShardingError(f"{what} is {kind}\n  try: a torch.Tensor with data")
    return value
