"""Meshes of some stages: their ranks, axes and groups, and the way back to the whole mesh."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.runtime.process_groups import (
    groups_for,
    holders_mesh,
    pipeline_mesh_of,
    place_in,
    spec_of,
    whole_group,
)
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from tests.ranks import RankPool

SPEC = MeshSpec({"dp": 2, "pp": 2, "tp": 1})
AXES = [("dp",), ("tp",), ("dp", "tp"), ("pp",)]


def _whole() -> DeviceMesh:
    return init_device_mesh("cpu", SPEC.sizes, mesh_dim_names=SPEC.names)


def _gathered(name: str, size: int) -> list[int]:
    """What an all-gather of rank numbers over a group collects, in its order."""
    c10d = torch.ops._c10d_functional
    gathered = c10d.all_gather_into_tensor(torch.tensor([dist.get_rank()]), size, name)
    return c10d.wait_tensor(gathered).tolist()


def _found(rank: int) -> dict[tuple[int, ...], Any]:
    mesh = _whole()
    found: dict[tuple[int, ...], Any] = {}
    for holders in ((0,), (1,)):
        part = holders_mesh(mesh, "pp", holders)
        assert holders_mesh(mesh, "pp", holders) is part  # made once
        assert pipeline_mesh_of(part) is mesh and pipeline_mesh_of(mesh) is None
        assert spec_of(part) == MeshSpec({"dp": 2, "pp": 1, "tp": 1})
        assert part.mesh_dim_names == SPEC.names
        place = place_in(part)
        names = groups_for(mesh if place is None else part, AXES)
        groups = {} if place is None else {a: _gathered(n, spec_of(part).size(*a)) for a, n in names.items()}
        found[holders] = part.mesh.flatten().tolist(), place, groups
    assert holders_mesh(mesh, "pp", (0, 1)) is mesh
    return found


def test_ranks_places_and_groups(ranks: RankPool) -> None:
    for rank, found in enumerate(ranks.run(_found, world=4)):
        for holders, (members, place, groups) in found.items():
            expected = [r for r in range(4) if SPEC.coordinate(r)["pp"] in holders]
            assert members == expected
            assert place == (expected.index(rank) if rank in expected else None)
            for axes, group in groups.items():
                assert group == [r for r in SPEC.group(rank, axes) if r in expected], (rank, holders, axes)
            assert len(groups) == (len(AXES) if rank in expected else 0)


def _saved(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    part = holders_mesh(mesh, "pp", (0,))
    twin = copy.deepcopy(part)
    assert twin == part and pipeline_mesh_of(twin) == mesh
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded == part and pipeline_mesh_of(loaded) == mesh
    if place_in(part) is not None:
        assert dist.get_world_size(whole_group(part)) == 2


def test_a_copy_and_a_saved_one_know_their_pipeline(ranks: RankPool) -> None:
    ranks.run(_saved, world=4)


def _refused(rank: int, holders: tuple[int, ...], axis: str) -> str:
    with pytest.raises(ShardingError) as error:
        holders_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), axis, holders)
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize("holders", [(), (2,), (1, 0), (0, 0), (-1,)], ids=str)
def test_what_is_no_set_of_stages(ranks: RankPool, holders: tuple[int, ...]) -> None:
    message = f"holders {holders} are no coordinates of axis 'pp' of mesh (pp=2)"
    assert ranks.run(_refused, holders, "pp", world=2) == [message] * 2


def _of_several(rank: int) -> str:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "tp"))
    part = holders_mesh(mesh, "pp", (0, 2))
    assert part == holders_mesh(copy.deepcopy(mesh), "pp", (0, 2))
    assert part.mesh.tolist() == [[0, 1], [4, 5]]
    if place_in(part) is not None:
        (name,) = groups_for(part, [("pp",)]).values()
        assert _gathered(name, 2) == [rank % 2, 4 + rank % 2]
    with pytest.raises(ShardingError) as error:
        groups_for(part, [("pp", "tp")])
    return str(error.value).splitlines()[0]


def test_a_group_of_several_stages_is_along_their_axis(ranks: RankPool) -> None:
    for text in ranks.run(_of_several, world=6):
        assert text.startswith("axes ('pp', 'tp') of a process group of stages (0, 2)")
