"""What a drawing shows when it opens, and that many outputs do not widen it."""

from __future__ import annotations

from xml.etree import ElementTree

import networkx as nx

from autoshard.drawing.draw import html_text
from autoshard.drawing.drawn_groups import group_by_module
from autoshard.drawing.scene import MARGIN, make_scene
from autoshard.drawing.svg import svg_text
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


def test_a_drawing_opens_on_its_first_block() -> None:
    """The input x, alone in the first row of the left column."""
    scene = make_scene(mlp())
    (first,) = [box for box in scene.boxes.values() if box.box.lines[0].left == "input x"]
    assert scene.opening == (first.left - MARGIN, first.box.width + 2 * MARGIN)
    assert scene.opening[1] < scene.width
    root = ElementTree.fromstring(svg_text(mlp()))
    assert root.get("data-left") == f"{first.left - MARGIN:.0f}"
    assert root.get("data-span") == f"{first.box.width + 2 * MARGIN:.0f}"
    page = html_text(mlp())
    assert "svg.dataset.left" in page and "svg.dataset.span" in page
