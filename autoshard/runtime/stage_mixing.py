"""Ops whose operands are held by different stages.

torch computes such an op on the ranks of its first operand alone and takes what the others have there, without a word
(`_foreach_mul_` of all gradients, the sum of two norms), or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autoshard.runtime.process_groups import kept_on, local_device, pipeline_mesh_of, spec_of, whole_group
from autoshard.runtime.sharding import distributed, like_parameter
from cost_model.errors import ShardingError
from passes.ir.torch_dtensor import answer_new_ops, dtensor_from, local_of
from passes.layout.placements import placements_to_layout


def result_elsewhere(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, propagate: Callable[[], Any]
) -> Any:
    """The op's result here; NotImplemented where torch's answer is as good. propagate: () -> torch's shardings."""
    operand = next((local_of(value) for value in args if isinstance(value, Tensor)), None)
    if mesh.get_coordinate() is not None or operand is None or op._schema.is_mutable:
        return NotImplemented
    asked = kwargs.get("device")
    device = operand.device if asked is None else torch.device(asked)
    if device.type == "cpu":
        return NotImplemented
    found = propagate()
    sharding = getattr(found, "output_spec", None)
    if isinstance(sharding, list | tuple):
        return [None if one is None else _empty(one, device) for one in sharding]
    return found if sharding is None else _empty(sharding, device)


def _empty(sharding: Any, device: torch.device) -> Tensor:
    """A tensor without elements; for no dims a zero, as torch has it."""
    meta = sharding.tensor_meta
    return dtensor_from(torch.zeros((0,)[: len(meta.shape)], dtype=meta.dtype, device=device), sharding)


aten = torch.ops.aten

_IN_PLACE = (
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.random_.default,
)
RANDOM_OPS = (*_IN_PLACE, aten.rand_like.default, aten.randn_like.default, aten.bernoulli.default)
"""Each takes one tensor, whose shape is that of its numbers."""


def drawn(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pipeline: DeviceMesh) -> Any:
    """The op, one of `RANDOM_OPS`, of a DTensor: all ranks of the pipeline draw the whole, and keep their part.

    The numbers are those that rank 0's generator gives next. A rank whose generator stood where rank 0's does goes on
    as one process would; any other's stays where it is.
    """
    target, *rest = args
    whole = torch.empty(target.shape, dtype=target.dtype, device=local_device(pipeline))
    if op is aten.bernoulli.default:
        whole = target.full_tensor()
    with _generator_of_first(kwargs.get("generator"), pipeline):
        made = op(whole, *rest, **kwargs)
    part = like_parameter(made, target)
    if op not in _IN_PLACE:
        return part
    local_of(target).copy_(local_of(part))
    return target


@contextmanager
def _generator_of_first(given: torch.Generator | None, pipeline: DeviceMesh) -> Generator[None]:
    device = local_device(pipeline)
    generator = _default_generator(device) if given is None else given
    mine = generator.get_state()
    first = mine.to(device, copy=True)
    dist.broadcast(first, 0, group=whole_group(pipeline))
    first = first.to(mine.device)
    generator.set_state(first)
    try:
        yield
    finally:
        if not torch.equal(first, mine):
            generator.set_state(mine)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]


def mix_stages() -> None:
    """From now on, in this process: an op of lists runs stage by stage; one that writes into its first operand brings
    the others to its ranks; any other has its operands whole on all ranks, as its result is."""
    answer_new_ops(_answer, first=True)


@torch.no_grad()
def _answer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], propagate: Callable[[], Any]) -> Any:
    meshes = {v.device_mesh for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, DTensor)}
    pipeline = next((found for mesh in meshes if (found := _pipeline_with(mesh)) is not None), None)
    if pipeline is None:
        return NotImplemented
    if op in RANDOM_OPS and not args[0].is_meta:
        return drawn(op, args, kwargs, pipeline)
    if len(meshes) < 2:
        return result_elsewhere(op, args, kwargs, meshes.pop(), propagate)
    if op._schema.name.startswith("aten::_foreach") and isinstance(args[0], list | tuple):
        return _stage_by_stage(op, args, kwargs)
    if not op._schema.is_mutable:
        whole = lambda value: _on(value, pipeline)
        return op(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))
    target = args[0]
    if not _writes_first_only(op) or not isinstance(target, DTensor):
        raise ShardingError(
            f"{op} writes into tensors of different stages\n  try: a call for the tensors of each stage"
        )
    like = lambda value: value if value is target else _beside(value, target)
    return op(*pytree.tree_map(like, args), **pytree.tree_map(like, kwargs))


def _pipeline_with(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of all stages of which `mesh` is some, or all; None where there are no stages."""
    return mesh if kept_on(mesh, "stages") else pipeline_mesh_of(mesh)


def _writes_first_only(op: Any) -> bool:
    written = [one.alias_info is not None and one.alias_info.is_write for one in op._schema.arguments]
    return written[0] and sum(written) == 1


def _stage_by_stage(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op of lists whose i-th tensors belong together: one call for each mesh that the first list's are on."""
    first = args[0]
    places: dict[DeviceMesh | None, list[int]] = {}
    for i, value in enumerate(first):
        places.setdefault(value.device_mesh if isinstance(value, DTensor) else None, []).append(i)
    results: list[Any] = [None] * len(first)
    for chosen in places.values():
        ours = [first[i] for i in chosen]

        def part(value: Any, chosen: list[int] = chosen, ours: list[Tensor] = ours) -> Any:
            if isinstance(value, list | tuple) and len(value) == len(first):
                return [_beside(value[i], own) for i, own in zip(chosen, ours, strict=True)]
            return _beside(value, ours[0])

        found = op(ours, *map(part, args[1:]), **{name: part(value) for name, value in kwargs.items()})
        for i, result in zip(chosen, found or (), strict=False):
            results[i] = result
    return None if not op._schema.returns else results


def _beside(value: Any, target: Tensor) -> Any:
    """A DTensor on other ranks as an operand beside `target`: cut as it is where of its shape, or whole."""
    if (
        not isinstance(value, DTensor)
        or not isinstance(target, DTensor)
        or value.device_mesh == target.device_mesh
    ):
        return value
    if value.ndim and value.shape == target.shape:
        return like_parameter(value.full_tensor(), target)
    return _on(value, target.device_mesh)


def _on(value: Any, mesh: DeviceMesh) -> Any:
    """A DTensor on other ranks, whole on each of `mesh`; anything else as it is."""
    if not isinstance(value, DTensor) or value.device_mesh == mesh:
        return value
    whole, placed = value.full_tensor(), (Replicate(),) * mesh.ndim
    layout = placements_to_layout(placed, tuple(whole.shape), spec_of(mesh), what="an operand")
    return distributed(whole, mesh, placed, layout, from_first=False)
