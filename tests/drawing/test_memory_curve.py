"""The curve of a step's bytes in a drawing: where its points are, and that the plan's own are in it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import torch
from torch import nn

from autoshard import MeshSpec, Plan, find_plan
from autoshard.drawing.svg import MemoryCurve, curve_of, curve_svg, svg_text


def planned() -> Plan:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    return find_plan(model, MeshSpec({"dp": 1}), (torch.zeros(32, 8),), profile="cpu", backend="eager")


def test_points_lie_where_their_bytes_say() -> None:
    """260 wide, 30 high: 10 of 20 bytes half way up, the second of four steps a third along."""
    curve = MemoryCurve(((0, 0), (1, 10), (3, 20)), 2, "peak 20B: <kept>")
    area, turn, peak, text = curve_svg(curve, 100.0, 50.0)
    assert 'd="M100.0 80.0 L100.0 80.0 L186.7 65.0 L360.0 50.0 L360.0 80.0 z"' in area
    assert 'x1="273.3"' in turn and 'cx="360.0" cy="50.0"' in peak
    assert text.endswith(">peak 20B: &lt;kept&gt;</text>")


def test_a_picture_of_a_plan_has_its_curve(tmp_path: Path) -> None:
    plan = planned()
    graph = plan.to_networkx()
    curve = curve_of(graph)
    assert curve is not None and plan.memory is not None
    assert curve.points == tuple((step.place, step.nbytes) for step in plan.memory.steps)
    assert curve.backward == 3
    # 2048 of 6144 bytes are kept, and 1536 each are inputs and the optimizer's.
    assert curve.text == "peak 6.144KB: kept 33%, optimizer 25%, inputs 25%, parameters 12%, gradients 4%"
    assert curve.text in plan.draw(tmp_path / "plan.svg").read_text()
    # What other tools read keeps it, as text and numbers.
    read = nx.read_graphml(plan.draw(tmp_path / "plan.graphml"))
    assert curve_of(read) == curve


def test_without_a_timeline_there_is_no_curve_and_no_room_for_one() -> None:
    graph = planned().to_networkx()
    height = lambda: float(ElementTree.fromstring(svg_text(graph)).attrib["height"])
    with_curve = height()
    for key in ("memory", "memory_peak", "memory_backward"):
        del graph.graph[key]
    assert curve_of(graph) is None
    assert height() == with_curve - 40 and not re.search('class="memory"', svg_text(graph))
