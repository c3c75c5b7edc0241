"""Groups over one and several axes hold the right ranks in the right order, and are made once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
