"""Process groups over axes of a DeviceMesh, and meshes of the ranks of some stages, each made once per mesh.

What is held by one stage, or by several, is a DTensor on the mesh of their ranks. On the other ranks such a mesh is
one that the rank is no member of. torch's DTensors know that: their local tensor is empty there, and an op computes
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from cost_model.errors import ShardingError
from cost_model.measure.peers import existing_group, groups_over, local_device, new_group
from cost_model.mesh import MeshSpec
from passes.ir.torch_dtensor import forget_op_layouts, mesh_elsewhere


def bound_device() -> torch.device | None:
    """The `device_id` that the default process group was made with, if any."""
    return getattr(dist.group.WORLD, "bound_device_id", None)


class Kept(dict[Any, Any]):
    """Values that belong to a process: a saved mesh comes back without any, a copied one shares them.

    It is saved as an empty OrderedDict, which `torch.load` takes without being told of this class.
    """

    def __reduce__(self) -> Any:
        return OrderedDict, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return self


def kept_on(mesh: DeviceMesh, what: str) -> Kept:
    """The values of kind `what` that there are so far, to be read and added to."""
    name = f"_autoshard_{what}"
    found = vars(mesh).get(name)
    if not isinstance(found, Kept):
        found = vars(mesh)[name] = Kept()
    return found


def new_group_of(mesh: DeviceMesh, members: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup | None:
    """The one of the new groups of `members` (ranks of the world, no rank twice) that this rank is in, if any.

    Every rank of the world must pass the same. mesh: that of all the ranks that are meant. NCCL is not connected.
    """
    if mesh.device_type != "cpu" and bound_device() is not None:
        return _split(mesh, members, name)
    return new_group(members, name)


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


class PartOf(NamedTuple):
    """A mesh of stages as a part of `whole`: the ranks whose coordinate along `axis` is in `holders`."""

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
    """How a mesh that `holders_mesh` made is a part of another; None for any other mesh."""
    found = vars(mesh).get("_autoshard_part_of")
    return None if found is None else PartOf(*found)


def pipeline_mesh_of(mesh: DeviceMesh) -> DeviceMesh | None:
    """The whole mesh that `holders_mesh` took a part of; None for any other mesh."""
    part = part_of(mesh)
    return None if part is None else part.whole


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
    members = [[line[i] for i in holders] for line in groups_over(spec, (axis,))]
    group = new_group_of(mesh, members, f"autoshard {axis} {','.join(map(str, holders))}")
    if group is not None:
        connect(group, mesh)
    return group


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
    made = kept_on(mesh, "groups")
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


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh."""
    spec = spec_of(mesh)
    groups_for(mesh, [spec.names])
    return kept_on(mesh, "groups")[spec.names]


def _group(mesh: DeviceMesh, spec: MeshSpec, axes: Axes) -> dist.ProcessGroup:
    part = part_of(mesh)
    if part is not None:
        return _group_of_part(mesh, part, axes)
    group = existing_group(mesh, spec, axes)
    group = group or new_group_of(mesh, groups_over(spec, axes), f"autoshard {','.join(axes)}")
    assert group is not None
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
    return kept_on(part.whole, "groups")[others]
