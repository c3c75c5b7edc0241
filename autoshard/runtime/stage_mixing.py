"""Ops whose operands are held by different stages.

torch computes such an op on the ranks of its first operand alone and takes what the others have there, without a word
(`_foreach_mul_` of all gradients, the sum of two norms), or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.runtime.kept_on_mesh import kept_on
from autoshard.runtime.sharding import distributed, like_parameter
from autoshard.runtime.stage_elsewhere import result_elsewhere
from autoshard.runtime.stage_mesh import pipeline_mesh_of, spec_of
from autoshard.runtime.stage_random import RANDOM_OPS, drawn
from cost_model.errors import ShardingError
from passes.ir.torch_dtensor import answer_new_ops
from passes.layout.placements import placements_to_layout

__all__ = ["mix_stages"]


def mix_stages() -> None:
    """From now on, in this process: an op of lists runs stage by stage; one that writes into its first operand brings
    the others to its ranks; any other has its operands whole on all ranks, as its result is."""
    answer_new_ops(_answer)


@torch.no_grad()
def _answer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], propagate: Callable[[], Any]) -> Any:
    meshes = {value.device_mesh for value in _dtensors((args, kwargs))}
    pipeline = next((found for mesh in meshes if (found := _pipeline_with(mesh)) is not None), None)
    if pipeline is None:
        return NotImplemented
    if op in RANDOM_OPS and not args[0].is_meta:
        return drawn(op, args, kwargs, pipeline)
    if len(meshes) < 2:
        return result_elsewhere(op, args, kwargs, meshes.pop(), propagate)
    if _is_of_lists(op, args):
        return _stage_by_stage(op, args, kwargs)
    if not op._schema.is_mutable:
        whole = lambda value: _on(value, pipeline)
        return op(*_mapped(whole, args), **_mapped(whole, kwargs))
    target = args[0]
    if not _writes_first_only(op) or not isinstance(target, DTensor):
        raise ShardingError(
            f"{op} writes into tensors of different stages\n  try: a call for the tensors of each stage"
        )
    like = lambda value: value if value is target else _beside(value, target)
    return op(*_mapped(like, args), **_mapped(like, kwargs))


def _pipeline_with(mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh of all stages of which `mesh` is some, or all; None where there are no stages."""
    return mesh if kept_on(mesh, "stages") else pipeline_mesh_of(mesh)


def _is_of_lists(op: Any, args: tuple[Any, ...]) -> bool:
    return op._schema.name.startswith("aten::_foreach") and isinstance(args[0], list | tuple)


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
    return distributed(whole, mesh, placed, layout, spec_of(mesh), from_first=False)


def _mapped(change: Any, values: Any) -> Any:
    if isinstance(values, dict):
        return {name: _mapped(change, value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_mapped(change, value) for value in values)
    return change(values)


def _dtensors(values: Any) -> Iterator[DTensor]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _dtensors(value)
    elif isinstance(values, DTensor):
        yield values
