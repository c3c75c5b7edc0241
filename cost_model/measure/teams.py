"""The process groups of a mesh, one for every shape that its axes make, alone and together."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_model.groups import GroupShape, shapes_of
from cost_model.measure.collective_work import Team
from cost_model.mesh import MeshSpec

__all__ = ["new_group_over", "teams_of"]

Axes = tuple[str, ...]


@contextmanager
def teams_of(mesh: DeviceMesh, spec: MeshSpec) -> Generator[Mapping[GroupShape, Team]]:
    """This rank's group of every shape. The mesh holds all ranks of the world, which enter together.

    Groups of several axes exist only inside the context. The world's own group serves for the whole world.
    """
    made: list[dist.ProcessGroup] = []
    teams: dict[GroupShape, Team] = {}
    try:
        for shape, axes in shapes_of(spec).items():
            group = _existing(mesh, spec, axes)
            if group is None:
                group = new_group_over(spec, axes)
                made.append(group)
            teams[shape] = Team(group, spec.group(dist.get_rank(), axes))
        yield teams
    finally:
        for group in made:
            dist.destroy_process_group(group)


def _existing(mesh: DeviceMesh, spec: MeshSpec, axes: Axes) -> dist.ProcessGroup | None:
    if len(axes) == 1:
        return mesh.get_group(spec.index(axes[0]))
    if spec.size(*axes) == dist.get_world_size():
        return dist.group.WORLD
    return None


def new_group_over(spec: MeshSpec, axes: Axes) -> dist.ProcessGroup:
    """This rank's group along `axes`. Every rank of the world makes every one of them, in the same order."""
    mine = None
    for ranks in dict.fromkeys(spec.group(rank, axes) for rank in range(spec.device_count)):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine
