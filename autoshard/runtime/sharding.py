"""Where a model's tensors are, and how they come to their ranks: to the mesh's device, and each rank's shard of them.

A model may be on the CPU, on the rank's own device, partly here and partly there, or on `meta`. What is on the CPU
moves when the plan is carried out; anything on a third device is an error before that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard.arguments import check_unwrapped
from autoshard.runtime.process_groups import (
    bound_device,
    local_device,
    pipeline_mesh_of,
    place_in,
    spec_of,
    whole_group,
)
from cost_model.errors import ShardingError, few
from cost_model.mesh import MeshSpec
from passes.capture.model_state import check_initialised, named_parameters
from passes.capture.places import Root, Via, contents, refill
from passes.capture.surroundings import held_by, module_attributes
from passes.ir.torch_dtensor import dtensor_from, is_partial, local_of, memory_of, sharding_of
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout


def check_placed(model: nn.Module, mesh: DeviceMesh) -> None:
    """`check_bound` and `check_devices` for this rank."""
    device = local_device(mesh)
    check_bound(device, bound_device())
    check_devices(model, device)


def check_devices(model: nn.Module, device: torch.device) -> None:
    """ShardingError, saying what is where, unless every parameter and buffer is on `device`, the CPU or `meta`."""
    places: dict[torch.device, list[str]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        places.setdefault(tensor.device, []).append(name)
    wrong = [place for place in places if place.type not in ("cpu", "meta") and place != device]
    if not wrong:
        return
    lines = [f"  {place}: {few(names, 4)}" for place, names in places.items()]
    remedy = (
        "model.cpu(), or a mesh of the model's device type"
        if device.type == "cpu"
        else f"torch.{device.type}.set_device(local rank) before the model is made, or model.to({str(device)!r})"
    )
    raise ShardingError(
        f"the model has tensors on {', '.join(map(str, wrong))}, and this rank's part of the mesh is {device}\n"
        + "\n".join(lines)
        + f"\n  try: {remedy}"
    )


def check_bound(device: torch.device, bound: torch.device | None) -> None:
    """ShardingError if the process group was made for another device than the process's current one."""
    if bound is not None and bound.type == device.type and bound != device:
        raise ShardingError(
            f"the process group is bound to {bound}, and the process's current device is {device}\n"
            f"  try: torch.{device.type}.set_device({bound.index}) before init_process_group(device_id=...)"
        )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Every buffer and plain tensor attribute to `device`, those on `meta` excepted; one that several modules share
    stays one.

    As `model.to` does it, a moved buffer is a new tensor in the old one's place.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id stays its own
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name, buffer in table.items():
                if type(buffer) is not Tensor and (buffer is None or table is not module._buffers):
                    continue
                if buffer.is_meta or buffer.requires_grad or buffer.device == device:
                    continue
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer, buffer.to(device)
                table[name] = moved[id(buffer)][1]


def arrived(tensor: Tensor, name: str, device: torch.device) -> Tensor:
    """A call's tensor on `device` (differentiable): a CPU tensor is copied there, without waiting for it.

    Raises ShardingError for a tensor on another device, whose values a copy would fetch from a device that
    is some other rank's.
    """
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and not isinstance(tensor, DTensor):
        return tensor.to(device, non_blocking=True)
    if tensor.is_meta:
        raise ShardingError(
            f"{name} is on meta, without values\n"
            f"  try: model.to_empty(device={device.type!r}) and then load_state_dict, or a tensor that has values"
        )
    raise ShardingError(
        f"{name} is on {tensor.device}, and this rank's part of the mesh is {device}\n"
        f"  try: {name}.to({str(device)!r}), or a CPU tensor, which autoshard moves"
    )


def seed_on(seed: Tensor, device: torch.device) -> Tensor:
    """A CPU seed on `device`, written there by a kernel with the number as its argument: a copy from pageable
    memory would make the host wait for the device in every step."""
    if device.type == "cpu":
        return seed
    return torch.full((), int(seed), dtype=torch.int64, device=device)


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
    whole: Tensor, mesh: DeviceMesh, placed: Sequence[Placement], layout: Layout, *, from_first: bool
) -> DTensor:
    """A DTensor of `whole`; of rank 0's values if `from_first`, else each rank cuts its own.

    Where `mesh` is of some stages, ranks of others have no part of it; `from_first` is for all of them together.
    """
    device = torch.device("meta") if whole.is_meta else local_device(mesh)
    spec, place = spec_of(mesh), place_in(mesh)
    shape = (0,)[: whole.ndim] if place is None else layout.local_shape(whole.shape, spec, place)
    # Never a view, which would keep the whole tensor alive.
    local = torch.zeros(shape, dtype=whole.dtype, device=device)
    if from_first:
        _receive(local, whole, layout, spec, mesh)
    elif place is not None:
        local.copy_(shard_of(whole, layout, spec, place))
    stride = torch.empty(whole.shape, device="meta").stride()
    made = DTensor.from_local(local, mesh, placed, run_check=False, shape=whole.shape, stride=stride)
    # On other ranks a number has no dims either, as torch's ops make it; `from_local` makes it of one.
    return cast(DTensor, dtensor_from(local, sharding_of(made)))


def _receive(local: Tensor, whole: Tensor, layout: Layout, spec: MeshSpec, mesh: DeviceMesh) -> None:
    """Into `local` this rank's shard of rank 0's `whole`, broadcast in slabs of dim 0 of at most _PIECE_BYTES."""
    place, device, group = place_in(mesh), local_device(mesh), whole_group(pipeline_mesh_of(mesh) or mesh)
    if whole.ndim == 0:
        value = whole.to(device, copy=True)
        dist.broadcast(value, 0, group=group)
        if place is not None:
            local.copy_(value)
        return
    first, last = (0, 0) if place is None else layout.interval(whole.shape, spec, 0, place)
    row_bytes = max(1, math.prod(whole.shape[1:]) * whole.element_size())
    step = max(1, _PIECE_BYTES // row_bytes)
    inner = Layout(((), *layout.dims[1:]), (), (None, *layout.sizes[1:]))
    for start in range(0, whole.shape[0], step):
        stop = min(start + step, whole.shape[0])
        slab = whole[start:stop].to(device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(slab, 0, group=group)
        lo, hi = max(start, first), min(stop, last)
        if place is not None and lo < hi:
            local[lo - first : hi - first] = shard_of(slab, inner, spec, place)[lo - start : hi - start]


def like_parameter(whole: Tensor, parameter: Tensor) -> DTensor:
    """`whole`, the same on all ranks, with the mesh and placements of the DTensor `parameter`: of a pending sum the
    first ranks have it, others 0."""
    assert isinstance(parameter, DTensor)
    mesh, placed = parameter.device_mesh, parameter.placements
    spec, cut = spec_of(mesh), [Replicate() if p.is_partial() else p for p in placed]
    layout = placements_to_layout(cut, whole.shape, spec, what="a gradient")
    made = distributed(whole, mesh, placed, layout, from_first=False)
    if any(p.is_partial("sum") and at for p, at in zip(placed, mesh.get_coordinate() or (), strict=False)):
        local_of(made).zero_()
    return made


def as_laid_out(value: Tensor, target: DTensor) -> DTensor:
    """`value`, of the shape of `target`, on its mesh and in its placements."""
    if not isinstance(value, DTensor):
        return like_parameter(value, target)
    alike = value.device_mesh == target.device_mesh
    if alike and value.placements == target.placements:
        return value
    if alike and not is_partial(target):
        return value.redistribute(placements=target.placements)
    return like_parameter(value.full_tensor(), target)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 22


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Two 64-bit sums of the tensor's words, plain and weighted by position (modulo 2^64).

    Equal tensors have equal sums; tensors of two random seeds have not. Bits are compared, so NaNs
    are like any value.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.contiguous().view(-1).view(_WORDS[real.element_size()])
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE].to(torch.int64)
        position = torch.arange(start + 1, start + 1 + piece.numel(), device=tensor.device)
        plain += piece.sum()
        weighted += (piece * position).sum()
    return int(plain), int(weighted)


def differing(tensors: Sequence[Tensor], mesh: DeviceMesh) -> list[bool]:
    """Per tensor, whether some rank of the mesh has other values than rank 0. The same on all ranks.

    Every rank must pass tensors of the same shapes.
    """
    if mesh.size() == 1 or not tensors:
        return [False] * len(tensors)
    mine = torch.tensor([checksum(t) for t in tensors], dtype=torch.int64, device=local_device(mesh))
    low, high = mine.clone(), mine.clone()
    group = whole_group(mesh)
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    return (low != high).any(1).tolist()


def held_layouts(model: nn.Module, spec: MeshSpec) -> dict[str, Layout]:
    """The layouts that parameters have: of those that are still the model's. A new layer's are free."""
    return {
        name: placements_to_layout(parameter.placements, tuple(parameter.shape), spec, what=name)
        for name, parameter in named_parameters(model).items()
        if isinstance(parameter, DTensor)
    }


def make_ready(model: nn.Module, mesh: DeviceMesh) -> None:
    """Its tensors are where this rank can have them, it is in no other wrapper, and only parameters are DTensors."""
    for name, parameter in named_parameters(model).items():
        check_initialised(parameter, name)
    check_placed(model, mesh)
    check_unwrapped(model)
    _gather_state(model)


@torch.no_grad()
def _gather_state(model: nn.Module) -> None:
    """Buffers, and attributes and what they hold, that a script made of parallel parameters (`torch.ones_like(p)`,
    `p.detach().clone()`) become whole. On all ranks together. ShardingError for one in the memory of a parameter."""
    own = {memory_of(p): name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for where, table in list(_tables(model)):
        held = contents(table)
        pairs = list(held.items() if isinstance(held, dict) else enumerate(held))
        made = [key for key, value in pairs if _is_made(value)]
        for key in made:
            if (parameter := own.get(memory_of(held[key]))) is not None:
                raise ShardingError(
                    f"{where} {key!r} shares memory with parameter {parameter}, which it would no longer follow\n"
                    f"  try: .clone() of it, or read {parameter} in forward"
                )
            held[key] = held[key].full_tensor()
        if made:
            refill(table, held)


def _is_made(value: Any) -> bool:
    return isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and not value.requires_grad


def _tables(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Containers of tensors that are no parameters, with words for an error."""
    for name, module in model.named_modules():
        yield f"{name or 'the model'}: buffer", module._buffers
        yield f"{name or 'the model'}: attribute", vars(module)
        for key, value in module_attributes(module).items():
            if isinstance(value, Tensor):
                continue
            for container in held_by(Via(Root(module, name), key, True), value):
                if isinstance(container.value, dict | list):
                    yield str(container.where), container.value
