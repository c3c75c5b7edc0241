"""Process groups over one or several axes of a DeviceMesh, made once per mesh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.devices import bound_device, local_device
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec

__all__ = ["axes_by_group", "groups_for", "whole_group"]

Axes = tuple[str, ...]


class _Groups(dict[Axes, dist.ProcessGroup]):
    """Groups belong to a process: a saved mesh comes back without any, a copied one shares them.

    They are saved as an empty OrderedDict, which `torch.load` takes without being told of this class.
    """

    def __reduce__(self) -> Any:
        return OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Groups:
        return self


def groups_for(mesh: DeviceMesh, axes_list: Iterable[Axes]) -> Mapping[Axes, str]:
    """Axes -> name of this rank's process group over them, for functional collectives.

    A group's ranks are in mesh order, the first of its axes varying slowest; so the axes of a tuple
    must be in mesh order. Groups that do not exist yet are made in the order of `axes_list`, by all
    ranks of the world together: every rank must pass the same list. They live as long as the mesh, and are
    those of the mesh or of the world where these have the same ranks. On NCCL they are connected on return.

    Raises ShardingError for an unknown axis or axes out of order.
    """
    spec = MeshSpec.of(mesh)
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
                _connect(group, mesh)
            made[axes] = group
        names[axes] = made[axes].group_name
    return names


def axes_by_group(mesh: DeviceMesh) -> Mapping[str, Axes]:
    """The inverse of what `groups_for` gave so far: name of a process group -> its axes."""
    return {group.group_name: axes for axes, group in _made(mesh).items()}


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh."""
    spec = MeshSpec.of(mesh)
    groups_for(mesh, [spec.names])
    return _made(mesh)[spec.names]


def _made(mesh: DeviceMesh) -> _Groups:
    """What there is so far, kept on the mesh as its own groups are: an equal mesh of another world has others."""
    found = vars(mesh).get("_autoshard_groups")
    if not isinstance(found, _Groups):
        found = vars(mesh)["_autoshard_groups"] = _Groups()
    return found


def _group(mesh: DeviceMesh, spec: MeshSpec, axes: Axes) -> dist.ProcessGroup:
    real = [axis for axis in axes if spec.size(axis) > 1]
    if len(real) < 2:  # axes of one rank change nothing: no second communicator for the same ranks
        return mesh.get_group(spec.index((real or axes)[0]))
    if spec.size(*axes) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    # The other axes, in mesh order, number the groups: the same order of creation on every rank.
    members = {spec.group(rank, axes): None for rank in range(spec.device_count)}
    name = f"autoshard {','.join(axes)}"
    if mesh.device_type != "cpu" and bound_device() is not None:
        return _split(list(members), spec, axes, name)
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks), group_desc=name)
        if dist.get_rank() in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _split(members: list[tuple[int, ...]], spec: MeshSpec, axes: Axes, name: str) -> dist.ProcessGroup:
    """One split of the communicator of all ranks, which all of them take part in, makes all groups at once."""
    if spec.device_count < dist.get_world_size():
        raise ShardingError(
            f"{spec} is a part of {dist.get_world_size()} processes, and a communicator over its axes {axes} would "
            "be split from that of all, which the others do not take part in\n"
            "  try: a mesh of all processes, or init_process_group without device_id"
        )
    group = dist.split_group(split_ranks=[list(ranks) for ranks in members], group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _connect(group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Make NCCL's communicator now, where all ranks are, and not in the first step.

    With a `device_id` that is done already. Without one it is the first collective that makes it.
    """
    if mesh.device_type == "cuda" and bound_device() is None:
        dist.all_reduce(torch.zeros(1, device=local_device(mesh)), group=group)
