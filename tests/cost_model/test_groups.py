import itertools

import pytest

from cost_model.errors import ProfileError, ShardingError
from cost_model.groups import LevelUse, Occupancy, group_ranks, group_shape, mesh_occupancies, occupancy
from cost_model.mesh import MeshSpec

NODES_OF_8 = (8, None)


def test_shape_of_one_axis_is_its_size_and_stride() -> None:
    mesh = MeshSpec({"dp": 4, "tp": 8})
    assert group_shape(mesh, ("tp",)) == ((8, 1),)
    assert group_shape(mesh, ("dp",)) == ((4, 8),)


def test_neighbouring_axes_merge_in_any_order() -> None:
    mesh = MeshSpec({"a": 2, "b": 3, "c": 4})
    assert group_shape(mesh, ("a", "b")) == group_shape(mesh, ("b", "a")) == ((6, 4),)
    assert group_shape(mesh, ("a", "c")) == ((2, 12), (4, 1))
    assert group_shape(mesh, ("a", "b", "c")) == ((24, 1),)


def test_axes_of_size_one_do_not_count() -> None:
    mesh = MeshSpec({"a": 1, "b": 3, "c": 1})
    assert group_shape(mesh, ("a", "c")) == ()
    assert group_shape(mesh, ("a", "b")) == ((3, 1),)


def test_unknown_axis() -> None:
    with pytest.raises(ShardingError, match="no axis 'pp'"):
        group_shape(MeshSpec({"dp": 2}), ("pp",))


def test_ranks_are_those_of_the_mesh() -> None:
    mesh = MeshSpec({"a": 2, "b": 3, "c": 2})
    for count in (1, 2, 3):
        for axes in itertools.combinations(mesh.names, count):
            for rank in range(mesh.device_count):
                group = sorted(mesh.group(rank, axes))
                assert list(group_ranks(group_shape(mesh, axes), group[0])) == group


def test_a_group_inside_a_node_uses_only_the_node() -> None:
    assert occupancy(range(8), NODES_OF_8) == Occupancy(8, (LevelUse(0, hops=7, depth=7, lanes=1),))


def test_a_strided_group_uses_only_the_network() -> None:
    assert occupancy(range(3, 32, 8), NODES_OF_8) == Occupancy(4, (LevelUse(1, hops=3, depth=3, lanes=1),))


def test_a_group_of_whole_nodes_uses_both_with_eight_lanes() -> None:
    assert occupancy(range(16), NODES_OF_8) == Occupancy(
        16, (LevelUse(0, hops=14, depth=7, lanes=1), LevelUse(1, hops=1, depth=1, lanes=8))
    )


def test_lanes_are_those_of_the_emptiest_node() -> None:
    assert occupancy(range(9), NODES_OF_8).uses[1].lanes == 1


def test_groups_that_straddle_nodes_differently_are_all_kept() -> None:
    mesh = MeshSpec({"dp": 8, "tp": 3})  # tp groups 0-2, 3-5, 6-8 (straddles), 9-11, ...
    uses = mesh_occupancies(mesh, ("tp",), NODES_OF_8)
    assert uses == {occupancy(r, NODES_OF_8) for r in ((0, 1, 2), (6, 7, 8))}


def test_aligned_groups_are_all_alike() -> None:
    mesh = MeshSpec({"a": 16, "b": 16, "c": 16})
    for count in (1, 2, 3):
        for axes in itertools.combinations(mesh.names, count):
            assert len(mesh_occupancies(mesh, axes, NODES_OF_8)) == 1


def test_links_that_do_not_reach() -> None:
    with pytest.raises(ProfileError, match="at most 8 consecutive ranks"):
        occupancy(range(0, 16, 8), (8,))
