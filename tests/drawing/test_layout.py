"""Groups are acyclic, rows follow the data, boxes do not overlap: on random graphs and on real shapes."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.drawing.boxes import assign_rows, spread
from autoshard.drawing.drawn_groups import group_by_module
from autoshard.drawing.svg import make_scene
from tests.drawing.samples import UNMOVED, mlp, through, transformer


def random_graph(seed: int, nodes: int = 40) -> nx.DiGraph:
    """Forward ops that read earlier ones, then backward ops that read earlier ones of either phase."""
    draw = random.Random(seed)
    graph = nx.DiGraph(mesh="mesh (dp=2)")
    names: list[str] = []
    for index in range(nodes):
        phase = "forward" if index < nodes // 2 else "backward"
        module = draw.choice(["", "a", "a.0", "a.1", "a.2", "b", "b.c.d"])
        kind = "param" if phase == "forward" and draw.random() < 0.2 else "op"
        name = f"n{index}"
        graph.add_node(
            name,
            label=f"op{index % 3}",
            kind=kind,
            layout="f32[4@dp]",
            seconds=1e-6,
            phase=phase,
            module=module,
        )
        if kind == "op":
            for source in draw.sample(names, min(len(names), draw.randint(0, 3))):
                collective = draw.choice(["", "", "all_gather[dp](dim=0)"])
                moved = through(collective, 1e-6, 8) if collective else UNMOVED
                graph.add_edge(source, name, layout="[@dp]", **moved)
        names.append(name)
    return graph


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_every_op_once_and_are_acyclic(seed: int) -> None:
    graph = random_graph(seed)
    grouping = group_by_module(graph, most_ops=0)
    members = [node for group in grouping.groups for node in group.members]
    assert sorted(members) == sorted(node for node in graph if graph.nodes[node]["kind"] == "op")
    assert nx.is_directed_acyclic_graph(nx.DiGraph(grouping.edges(graph)))
    for group in grouping.groups:
        assert {(graph.nodes[n]["module"], graph.nodes[n]["phase"]) for n in group.members} == {
            (group.key, group.phase)
        }


@pytest.mark.parametrize("seed", range(20))
def test_forward_runs_down_and_backward_up(seed: int) -> None:
    graph = random_graph(seed)
    grouping = group_by_module(graph, most_ops=0)
    edges = grouping.edges(graph)
    rows = assign_rows(grouping.groups, edges)
    assert min(rows) == 0
    for source, target in edges:
        phases = grouping.groups[source].phase, grouping.groups[target].phase
        if phases == ("forward", "forward"):
            assert rows[source] < rows[target]
        elif phases == ("backward", "backward"):
            assert rows[source] > rows[target]


def test_forward_and_backward_of_a_module_are_side_by_side() -> None:
    graph = transformer(2)
    grouping = group_by_module(graph)
    rows = assign_rows(grouping.groups, grouping.edges(graph))
    row_of = {(group.key, group.phase): rows[group.index] for group in grouping.groups}
    for module in ("layers.0.attn", "layers.0.mlp", "layers.1.attn.wo", "layers.1.mlp.w2"):
        assert row_of[module, "forward"] == row_of[module, "backward"], module


def test_modules_are_merged_until_there_are_few_enough_groups() -> None:
    graph = transformer(2)
    deep, shallow = group_by_module(graph), group_by_module(graph, most_groups=30)
    assert len(shallow.groups) < len(deep.groups)
    assert {group.key for group in shallow.groups} >= {"layers.0", "layers.1", "embed"}


@pytest.mark.parametrize(
    "graph", [mlp(), transformer(1), transformer(2), random_graph(1), random_graph(2, 90)]
)
def test_boxes_stay_apart_and_inside(graph: nx.DiGraph) -> None:
    scene = make_scene(graph)
    boxes = list(scene.boxes.values())
    for placed in boxes:
        assert placed.left >= 0 and placed.left + placed.box.width <= scene.width
        assert placed.top >= 0 and placed.top + placed.box.height <= scene.height
    for a, b in itertools.combinations(boxes, 2):
        beside = a.left + a.box.width < b.left or b.left + b.box.width < a.left
        above = a.top + a.box.height < b.top or b.top + b.box.height < a.top
        assert beside or above, (a.box.lines[0], b.box.lines[0])


def test_spread_moves_only_what_collides() -> None:
    assert spread([0.0, 10.0], [1.0, 1.0], [4.0]) == [0.0, 10.0]
    # Both want 5 and must be 4 apart: equal weights meet in the middle, a heavy one stays nearer.
    assert spread([5.0, 5.0], [1.0, 1.0], [4.0]) == [3.0, 7.0]
    assert spread([5.0, 5.0], [3.0, 1.0], [4.0]) == [4.0, 8.0]
    assert spread([], [], []) == []


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=6)
)
def test_spread_is_least_squares(cells: list[tuple[int, int, int]]) -> None:
    wanted, weights, widths = ([float(c[i]) for c in cells] for i in range(3))
    apart = widths[1:]
    found = spread(wanted, weights, apart)

    def loss(positions: list[float]) -> float:
        return sum(w * (p - t) ** 2 for p, t, w in zip(positions, wanted, weights, strict=True))

    assert all(b - a >= room - 1e-9 for a, b, room in zip(found, found[1:], apart, strict=False))
    # The problem is convex: if moving no block of neighbours helps, nothing does.
    for first, last in itertools.combinations(range(len(cells) + 1), 2):
        for step in (-1e-3, 1e-3):
            moved = [p + step if first <= i < last else p for i, p in enumerate(found)]
            if all(b - a >= room for a, b, room in zip(moved, moved[1:], apart, strict=False)):
                assert loss(moved) >= loss(found) - 1e-9
