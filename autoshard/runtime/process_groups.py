"""Process groups over one or several axes of a DeviceMesh, made once per mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec

__all__ = ["axes_by_group", "groups_for", "whole_group"]

Axes = tuple[str, ...]


def groups_for(mesh: DeviceMesh, axes_list: Iterable[Axes]) -> Mapping[Axes, str]:
    """Axes -> name of this rank's process group over them, for functional collectives.

    A group's ranks are in mesh order, the first of its axes varying slowest; so the axes of a tuple
    must be in mesh order. Groups that do not exist yet are made in the order of `axes_list`, by all
    ranks of the world together: every rank must pass the same list. They live as long as the mesh.

    Raises ShardingError for an unknown axis or axes out of order.
    """
    spec = MeshSpec.of(mesh)
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


def axes_by_group(mesh: DeviceMesh) -> Mapping[str, Axes]:
    """The inverse of what `groups_for` gave so far: name of a process group -> its axes."""
    made: Mapping[Axes, dist.ProcessGroup] = vars(mesh).get("_autoshard_groups", {})
    return {group.group_name: axes for axes, group in made.items()}


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh."""
    spec = MeshSpec.of(mesh)
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
