"""Meshes of the ranks of some stages of a pipeline: what is held by one stage, or by several, is a DTensor there.

On the other ranks such a mesh is one that the rank is no member of. torch's DTensors know that: their local tensor is
empty there, and an op computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.runtime.kept_on_mesh import kept_on
from autoshard.runtime.new_groups import connect, new_group_of, own_group
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.ir.torch_dtensor import forget_op_layouts, mesh_elsewhere

__all__ = [
    "PartOf",
    "holders_mesh",
    "is_of_stages",
    "part_of",
    "pipeline_mesh_of",
    "pipeline_of",
    "place_in",
    "spec_of",
]


class PartOf(NamedTuple):
    """What a mesh of stages is a part of: the ranks of `whole` whose coordinate along `axis` is in `holders`."""

    whole: DeviceMesh
    axis: str
    holders: tuple[int, ...]


def holders_mesh(mesh: DeviceMesh, axis: str, holders: tuple[int, ...]) -> DeviceMesh:
    """The ranks of `mesh` whose coordinate along `axis` is in `holders`: the same axes, `axis` of as many ranks.

    On another rank it is a mesh without this rank (`get_coordinate()` is None). With all coordinates it is `mesh`
    itself. Every rank of the mesh calls it, in the same order; it is made once and lives as long as `mesh`.

    Its groups are those of `mesh`; along `axis` a new one, of this rank alone or of the holders.

    Raises ShardingError for an unknown axis, or holders that are no ascending coordinates of it.
    """
    spec = MeshSpec.of(mesh)
    size = spec.size(axis)
    if not holders or list(holders) != sorted(set(holders)) or not set(holders) <= set(range(size)):
        raise ShardingError(
            f"holders {holders} are no coordinates of axis {axis!r} of {spec}\n"
            f"  try: one or several of 0 to {size - 1}, in ascending order"
        )
    if len(holders) == size:
        return mesh
    made = kept_on(mesh, "stages")
    if (axis, holders) not in made:
        made[axis, holders] = _part(mesh, spec, axis, holders)
    return made[axis, holders]


def part_of(mesh: DeviceMesh) -> PartOf | None:
    """What a mesh that `holders_mesh` made is a part of; None for any other mesh."""
    found = vars(mesh).get("_autoshard_part_of")
    return None if found is None else PartOf(*found)


def pipeline_mesh_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """The whole mesh that `holders_mesh` took a part of; None for any other mesh."""
    part = part_of(mesh)
    return None if part is None else part.whole


def is_of_stages(*values: Any) -> bool:
    """Whether one of them is a DTensor that not all stages hold."""
    return any(isinstance(v, DTensor) and part_of(v.device_mesh) is not None for v in values)


def pipeline_of(tensors: Iterable[Any]) -> DeviceMesh | None:
    """The mesh of all stages of which some hold one of `tensors`; None where there is none such."""
    meshes = (value.device_mesh for value in tensors if isinstance(value, DTensor))
    return next((found for mesh in meshes if (found := pipeline_mesh_of(mesh)) is not None), None)


def spec_of(mesh: DeviceMesh) -> MeshSpec:
    """A mesh by names and sizes. A rank of a part has its position in it, `place_in`, for its number."""
    if part_of(mesh) is None:
        return MeshSpec.of(mesh)
    assert mesh.mesh_dim_names is not None
    return MeshSpec(dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)), mesh.device_type)


def place_in(mesh: DeviceMesh) -> int | None:
    """This rank's position among the ranks of `mesh`, row by row; None if it is not there."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    place = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        place = place * size + index
    return place


def _part(mesh: DeviceMesh, spec: MeshSpec, axis: str, holders: tuple[int, ...]) -> DeviceMesh:
    dim = spec.index(axis)
    ranks = mesh.mesh.index_select(dim, torch.tensor(holders))
    along = _along(mesh, spec, axis, holders)
    if along is None or not bool((ranks == mesh.get_rank()).any()):
        part = mesh_elsewhere(mesh.device_type, ranks, spec.names)
    else:
        groups = [along if other == axis else mesh.get_group(i) for i, other in enumerate(spec.names)]
        part = DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=spec.names)
    # A tuple, which `torch.load` takes without being told of a class.
    vars(part)["_autoshard_part_of"] = (mesh, axis, holders)
    forget_op_layouts()
    return part


def _along(mesh: DeviceMesh, spec: MeshSpec, axis: str, holders: tuple[int, ...]) -> ProcessGroup | None:
    """This rank's group of the holders along `axis`; of itself alone where each is alone."""
    if len(holders) == 1:
        alone = kept_on(mesh, "own_group")
        if not alone:
            alone["group"] = own_group(mesh)
        return alone["group"]
    lines = {spec.group(rank, (axis,)): None for rank in range(spec.device_count)}
    members = [[line[i] for i in holders] for line in lines]
    group = new_group_of(mesh, members, f"autoshard {axis} {','.join(map(str, holders))}")
    if group is not None:
        connect(group, mesh)
    return group
