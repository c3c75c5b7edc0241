"""Process groups over one or several axes of a DeviceMesh, made once per mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec

__all__ = ["groups_for", "mesh_spec", "whole_group"]

Axes = tuple[str, ...]


def mesh_spec(mesh: DeviceMesh) -> MeshSpec:
    """The mesh by names and sizes. Unnamed dims are called "axis0", "axis1", ...

    Raises ShardingError where the mesh does not number its ranks 0, 1, 2, ... row-major: a rank's place
    in the mesh would not be its rank.
    """
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    spec = MeshSpec(dict(zip(names, mesh.shape, strict=True)), mesh.device_type)
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise ShardingError(
            f"mesh has ranks {ranks}\n  ranks must be 0, 1, 2, ... row by row\n"
            "  try: init_device_mesh(device_type, shape, mesh_dim_names=names)"
        )
    return spec


def groups_for(mesh: DeviceMesh, axes_list: Iterable[Axes]) -> Mapping[Axes, str]:
    """Axes -> name of this rank's process group over them, for functional collectives.

    A group's ranks are in mesh order, the first of its axes varying slowest; so the axes of a tuple
    must be in mesh order. Groups that do not exist yet are made in the order of `axes_list`, by all
    ranks of the world together: every rank must pass the same list. They live as long as the mesh.

    Raises ShardingError for an unknown axis or axes out of order.
    """
    spec = mesh_spec(mesh)
    # Kept on the mesh itself, as its own groups are: an equal mesh of another world has other groups.
    made: dict[Axes, dist.ProcessGroup] = vars(mesh).setdefault("_autoshard_groups", {})
    names: dict[Axes, str] = {}
    for axes in axes_list:
        if list(axes) != sorted(axes, key=spec.index) or len(set(axes)) < len(axes):
            raise ShardingError(
                f"axes {axes} of a process group are not in the order of the mesh, {spec.names}"
            )
        if axes not in made:
            made[axes] = _group(mesh, spec, axes)
        names[axes] = made[axes].group_name
    return names


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh."""
    spec = mesh_spec(mesh)
    groups_for(mesh, [spec.names])
    return vars(mesh)["_autoshard_groups"][spec.names]


def _group(mesh: DeviceMesh, spec: MeshSpec, axes: Axes) -> dist.ProcessGroup:
    if len(axes) == 1:
        return mesh.get_group(spec.index(axes[0]))
    if spec.size(*axes) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    # The other axes, in mesh order, number the groups: the same order of creation on every rank.
    members = {spec.group(rank, axes): None for rank in range(spec.device_count)}
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks), group_desc=f"autoshard {','.join(axes)}")
        if dist.get_rank() in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine
