"""Many outputs do not widen a drawing."""

from __future__ import annotations

import networkx as nx

from autoshard.drawing.drawn_groups import group_by_module
from autoshard.drawing.svg import make_scene
from tests.drawing.samples import UNMOVED, mlp


def with_outputs(count: int) -> nx.DiGraph:
    """The MLP with so many more outputs, each of which has a gradient that d_relu reads."""
    graph = mlp()
    for i in range(1, count + 1):
        data = graph.nodes["tangent"]
        graph.add_node(f"tangent_{i}", **{**data, "label": f"tangent {i}"})
        graph.add_edge(f"tangent_{i}", "d_relu", layout="", **UNMOVED)
    return graph


def test_all_tangents_are_one_box() -> None:
    graph = with_outputs(24)
    groups = [g for g in group_by_module(graph).groups if "tangent" in g.members]
    assert [len(g.members) for g in groups] == [25]
    titles = [box.box.lines[0].left for box in make_scene(graph).boxes.values()]
    assert [title for title in titles if "tangent" in title] == ["25 tangents"]
    assert make_scene(graph).width == make_scene(with_outputs(1)).width


def test_one_tangent_keeps_its_name() -> None:
    titles = [box.box.lines[0].left for box in make_scene(mlp()).boxes.values()]
    assert "tangent 0" in titles and "1 tangents" not in titles
