"""Groups over one and several axes hold the right ranks in the right order, and are made once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.runtime import process_groups
from autoshard.runtime.process_groups import groups_for, whole_group
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from tests.ranks import RankPool

AXES = [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")]
SPEC = MeshSpec({"a": 2, "b": 2, "c": 2})


def members(rank: int) -> dict[tuple[str, ...], list[int]]:
    """What an all-gather over each group collects, in its order."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    names = groups_for(mesh, AXES)
    assert names == groups_for(mesh, AXES)  # made once
    c10d = torch.ops._c10d_functional
    found: dict[tuple[str, ...], list[int]] = {}
    for axes, name in names.items():
        mine = torch.tensor([rank])
        gathered = c10d.all_gather_into_tensor(mine, SPEC.size(*axes), name)
        found[axes] = c10d.wait_tensor(gathered).tolist()
    assert dist.get_world_size(whole_group(mesh)) == 8
    return found


def test_every_combination_of_axes(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(members, world=8)):
        for axes in AXES:
            assert found[axes] == list(SPEC.group(rank, axes)), (rank, axes)


def shared(rank: int) -> tuple[bool, bool, int]:
    """Whether axes of one rank add no group of their own, and the groups that three names make."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    names = groups_for(mesh, [("a",), ("a", "b"), ("b", "c")])
    one = names[("a", "b")] == names[("a",)] == mesh.get_group("a").group_name
    other = names[("b", "c")] == mesh.get_group("c").group_name
    return one, other, len(set(names.values()))


def test_the_same_ranks_share_a_group(ranks: RankPool) -> None:
    assert ranks.run(shared, world=4) == [(True, True, 2)] * 4


def split(rank: int) -> list[list[list[int]]]:
    """What a process group that is bound to a device is asked to split into."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    asked: list[list[list[int]]] = []

    def split_group(*, split_ranks: list[list[int]], group_desc: str) -> dist.ProcessGroup:
        asked.append(split_ranks)
        return mesh.get_group("a")

    mesh._device_type = "cuda"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "bound_device", lambda: torch.device("cuda", rank))
        patch.setattr(dist, "split_group", split_group)
        groups_for(mesh, [("a", "c"), ("a", "b", "c"), ("a", "c")])
    return asked


def test_communicators_are_split_from_that_of_all_in_one_call(ranks: RankPool) -> None:
    """All ranks take part in the split, those of other groups too: each must ask for all groups, once."""
    assert ranks.run(split, world=8) == [[[[0, 1, 4, 5], [2, 3, 6, 7]]]] * 8


def refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    messages: list[str] = []
    for axes in (("x",), ("b", "a")):
        with pytest.raises(ShardingError) as error:
            groups_for(mesh, [axes])
        messages.append(str(error.value).splitlines()[0])
    with pytest.raises(ShardingError, match="ranks must be 0, 1, 2"):
        MeshSpec.of(DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("a",)))
    assert MeshSpec.of(init_device_mesh("cpu", (2,))) == MeshSpec({"axis0": 2})
    return messages


def test_refused(ranks: RankPool) -> None:
    assert ranks.run(refusals, world=2)[0] == [
        "mesh has no axis 'x'",
        "axes ('b', 'a') of a process group are not in the order of the mesh, ('a', 'b')",
    ]
