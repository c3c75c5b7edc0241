"""Process groups over one or several axes of a DeviceMesh, made once per mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.kept_on_mesh import Kept, kept_on
from autoshard.runtime.new_groups import connect, new_group_of
from autoshard.runtime.stage_mesh import PartOf, part_of, spec_of
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec

__all__ = ["axes_by_group", "groups_for", "whole_group"]

Axes = tuple[str, ...]


def groups_for(mesh: DeviceMesh, axes_list: Iterable[Axes]) -> Mapping[Axes, str]:
    """Axes -> name of this rank's process group over them, for functional collectives.

    A group's ranks are in mesh order, the first of its axes varying slowest; so the axes of a tuple
    must be in mesh order. Groups that do not exist yet are made in the order of `axes_list`, by all
    ranks of the world together: every rank must pass the same list. They live as long as the mesh, and are
    those of the mesh or of the world where these have the same ranks. On NCCL they are connected on return.

    Of a mesh of stages (`holders_mesh`) they are those of the whole mesh, so a list that one stage passes and another
    does not must have been passed with the whole mesh before.

    Raises ShardingError for an unknown axis or axes out of order.
    """
    spec = spec_of(mesh)
    made = _made(mesh)
    names: dict[Axes, str] = {}
    for axes in axes_list:
        if list(axes) != sorted(axes, key=spec.index) or len(set(axes)) < len(axes):
            raise ShardingError(
                f"axes {axes} of a process group are not in the order of the mesh, {spec.names}"
            )
        if axes not in made:
            group = _group(mesh, spec, axes)
            if group not in made.values():
                connect(group, mesh)
            made[axes] = group
        names[axes] = made[axes].group_name
    return names


def axes_by_group(mesh: DeviceMesh) -> Mapping[str, Axes]:
    """The inverse of what `groups_for` gave so far: name of a process group -> its axes."""
    return {group.group_name: axes for axes, group in _made(mesh).items()}


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh."""
    spec = spec_of(mesh)
    groups_for(mesh, [spec.names])
    return _made(mesh)[spec.names]


def _made(mesh: DeviceMesh) -> Kept[Axes, dist.ProcessGroup]:
    return kept_on(mesh, "groups")


def _group(mesh: DeviceMesh, spec: MeshSpec, axes: Axes) -> dist.ProcessGroup:
    part = part_of(mesh)
    if part is not None:
        return _group_of_part(mesh, part, axes)
    real = [axis for axis in axes if spec.size(axis) > 1]
    if len(real) < 2:  # axes of one rank change nothing: no second communicator for the same ranks
        return mesh.get_group(spec.index((real or axes)[0]))
    if spec.size(*axes) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    # The other axes, in mesh order, number the groups: the same order of creation on every rank.
    members = {spec.group(rank, axes): None for rank in range(spec.device_count)}
    group = new_group_of(mesh, list(members), f"autoshard {','.join(axes)}")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _group_of_part(mesh: DeviceMesh, part: PartOf, axes: Axes) -> dist.ProcessGroup:
    """Over axes beside that of the stages, the ranks of this one's stage are those of its group in the whole mesh."""
    if axes == (part.axis,):
        return mesh.get_group(part.axis)
    others = tuple(axis for axis in axes if axis != part.axis)
    if others != axes and len(part.holders) > 1:
        raise ShardingError(
            f"axes {axes} of a process group of stages {part.holders} are {part.axis!r} and others\n"
            f"  try: {(part.axis,)} and {others}, one after the other"
        )
    groups_for(part.whole, [others])
    return _made(part.whole)[others]
