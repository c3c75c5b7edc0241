"""New process groups, made by all ranks of the world together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.devices import bound_device, local_device
from cost_model.errors import ShardingError

__all__ = ["connect", "new_group_of", "own_group"]


def new_group_of(mesh: DeviceMesh, members: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
    """The one of the new groups of `members` (ranks of the world, no rank twice) that this rank is in, if any.

    Every rank of the world must pass the same. mesh: that of all the ranks that are meant. NCCL is not connected.
    """
    if mesh.device_type != "cpu" and bound_device() is not None:
        return _split(mesh, members, name)
    mine = None
    for ranks in members:
        group = dist.new_group(list(ranks), group_desc=name)
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
            mine = group
    return mine


def own_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A new group of this rank alone: what a mesh has for an axis of one rank."""
    name = "autoshard one rank"
    if mesh.device_type != "cpu" and bound_device() is not None:
        group = _split(mesh, [(rank,) for rank in range(mesh.size())], name)
    else:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


def connect(group: dist.ProcessGroup, mesh: DeviceMesh) -> None:
    """Make NCCL's communicator now, where all ranks are, and not in the first step.

    With a `device_id` that is done already. Without one it is the first collective that makes it.
    """
    if mesh.device_type == "cuda" and bound_device() is None:
        dist.all_reduce(torch.zeros(1, device=local_device(mesh)), group=group)


def _split(mesh: DeviceMesh, members: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
    """One split of the communicator of all ranks, which all of them take part in, makes all groups at once."""
    if mesh.size() < dist.get_world_size():
        raise ShardingError(
            f"the mesh is a part of {dist.get_world_size()} processes, and a communicator of its own ({name}) would "
            "be split from that of all, which the others do not take part in\n"
            "  try: a mesh of all processes, or init_process_group without device_id"
        )
    return dist.split_group(split_ranks=[list(ranks) for ranks in members], group_desc=name)
