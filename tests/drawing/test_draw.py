"""Files: chosen by suffix, well formed, and saying what the plan says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import networkx as nx
import pytest

from autoshard.drawing.draw import draw
from autoshard.drawing.svg import svg_text
from autoshard.plan.plan_graph import colour
from cost_model.errors import PlanError
from passes.redistribution.steps import STEPS
from tests.drawing.samples import UNMOVED, mlp, through, transformer

GATHER = "all_gather[tp](dim=0)"
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("suffix", [".svg", ".dot", ".json", ".graphml", ".SVG"])
def test_the_suffix_chooses_the_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plan{suffix}"
    assert draw(mlp(), path) == path
    start = {".svg": "<svg", ".dot": "digraph", ".json": "{", ".graphml": "<?xml"}
    assert path.read_text().lower().startswith(start[suffix.lower()])


@pytest.mark.parametrize(("name", "suffix"), [("plan.png", "'.png'"), ("plan", "''")])
def test_an_unknown_suffix_is_refused_with_those_that_work(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / name
    with pytest.raises(PlanError) as caught:
        draw(mlp(), path)
    assert str(caught.value) == (
        f"draw({str(path)!r}): no format has the suffix {suffix}\n"
        "  try: a name that ends in one of .html .svg .dot .json .graphml"
    )
    assert not path.exists()


def test_the_picture_says_what_the_plan_says() -> None:
    shown = texts(svg_text(mlp()))
    assert shown[0] == "mesh (tp=3)"
    assert "weight: f32[32@tp, 10]" in shown and "weight: f32[5, 32@tp]" in shown
    assert shown.count("all_gather[tp]") == 2 and shown.count("reduce_scatter[tp]") == 1
    assert "→ f32[8, 5]+tp:sum" in shown
    assert "result 160B 5 us" in shown


def test_equal_collectives_are_one_line_with_their_sum() -> None:
    graph = mlp()
    edge = {
        "collective": "all_gather[tp](dim=0); all_reduce[tp]()",
        "seconds": 3e-6,
        "nbytes": 1500,
        "each_kind": "all_gather; all_reduce",
        "each_axes": "tp; tp",
        "each_seconds": "2e-06; 1e-06",
        "each_nbytes": "1000; 500",
        "each_bucket": "-; -",
    }
    graph.edges["x", "up"].update(edge)
    graph.add_edge("tangent", "d_w0", layout="", **edge)
    graph.add_edge("d_relu", "d_w0", layout="", **edge)
    shown = texts(svg_text(graph))
    at = shown.index("all_gather[tp] ×2")
    assert shown[at : at + 4] == ["all_gather[tp] ×2", "2KB 4 us", "all_reduce[tp] ×2", "1KB 2 us"]
    legend = shown.index("all_reduce")
    assert shown[legend : legend + 2] == ["all_reduce", "×1 500B 1 us"]


def test_the_time_of_a_bucket_stands_beside_its_bytes(tmp_path: Path) -> None:
    """Of a transfer that is merged with others: its own seconds are what it adds to them."""
    graph, bucket = mlp(), "0.3 1500 2e-05"
    first, second = through(GATHER, 19e-6, 1000, bucket), through(GATHER, 1e-6, 500, bucket)
    graph.edges["0_weight", "up"].update(first)
    graph.edges["2_weight", "down"].update(second)
    graph.edges["x", "up"].update(UNMOVED)
    shown = texts(svg_text(graph))
    assert "weight 1KB, with its bucket 1.5KB 20 us" in shown
    assert "weight 500B, with its bucket 1.5KB 20 us" in shown
    assert "500B, with its bucket 1.5KB 20 us" in draw(graph, tmp_path / "plan.dot").read_text()
    graph.edges["2_weight", "down"].update(UNMOVED)
    graph.edges["x", "up"].update(second)  # now one box has all of the bucket, on two lines
    graph.edges["0_weight", "up"].update(UNMOVED)
    graph.add_edge("tangent", "d_w0", layout="", **first)
    graph.add_edge("d_relu", "d_w0", layout="", **second)
    at = (shown := texts(svg_text(graph))).index("all_gather[tp] ×2")
    assert shown[at + 1] == "1.5KB 20 us"


def test_collectives_are_coloured_by_kind() -> None:
    root = ElementTree.fromstring(svg_text(mlp()))
    gathered = [path for path in root.iter(f"{SVG}path") if colour("all_gather") in path.get("style", "")]
    assert len(gathered) == 2
    assert (
        len({colour(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "other")})
        == 5
    )


def test_every_step_that_moves_something_has_a_colour() -> None:
    for name, step in STEPS.items():
        assert (colour(name) != colour("other")) == (step.kind is not None), name


def test_the_legend_counts_folded_layers() -> None:
    shown = texts(svg_text(transformer(32)))
    # Forward: 12 gathers a layer (2 for each of q, k, v, w1, w3; the weights of wo, w2), 1 for the head.
    assert shown[shown.index("all_gather") + 1].startswith("×385 ")
    assert any(text.startswith("layers.0-31") for text in shown)
    assert "32 × 90 us" in shown


def test_names_that_need_escaping(tmp_path: Path) -> None:
    graph = mlp()
    graph.nodes["relu"]["label"] = 'a<b>&"c\\d'
    graph.nodes["relu"]["module"] = "m<1>"
    assert 'a<b>&"c\\d' in texts(svg_text(graph))
    assert r'label="a<b>&\"c\\d\nf32[8, 32@tp]' in draw(graph, tmp_path / "plan.dot").read_text()
    read = nx.read_graphml(draw(graph, tmp_path / "plan.graphml"))
    assert read.nodes["relu"]["label"] == 'a<b>&"c\\d'


@pytest.mark.parametrize("graph", [nx.DiGraph(), nx.DiGraph(mesh="mesh (dp=1)")])
def test_an_empty_plan_is_an_empty_picture(graph: nx.DiGraph) -> None:
    assert "no collectives" in texts(svg_text(graph))


def test_a_plan_without_backward_has_one_column() -> None:
    graph = mlp()
    graph.remove_nodes_from([n for n, data in graph.nodes(data=True) if data["phase"] == "backward"])
    shown = texts(svg_text(graph))
    assert "forward ↓" in shown and "backward ↑" not in shown


def test_json_and_graphml_hold_the_whole_graph(tmp_path: Path) -> None:
    graph = transformer(2)
    data = json.loads(draw(graph, tmp_path / "plan.json").read_text())
    assert nx.utils.graphs_equal(nx.node_link_graph(data, edges="edges"), graph)
    read = nx.read_graphml(draw(graph, tmp_path / "plan.graphml"))
    assert dict(read.nodes(data=True)) == dict(graph.nodes(data=True))
    assert {(a, b): data for a, b, data in read.edges(data=True)} == {
        (a, b): d for a, b, d in graph.edges(data=True)
    }


def test_dot_has_every_node_and_edge_and_balances(tmp_path: Path) -> None:
    graph = transformer(2)
    text = draw(graph, tmp_path / "plan.dot").read_text()
    assert len(re.findall(r'^ +"\S+" \[label=', text, re.MULTILINE)) == len(graph)
    assert text.count(" -> ") == graph.number_of_edges()
    assert text.count("{") == text.count("}")
    assert 'label="layers.0.attn.wq"' in text
