"""Runs of identical layers are drawn once, and nothing that they cost is lost."""

from __future__ import annotations

import networkx as nx

from autoshard.drawing.drawn_groups import fold_repeats
from autoshard.drawing.svg import make_scene, totals
from tests.drawing.samples import mlp, transformer


def seconds(graph: nx.DiGraph) -> float:
    return sum(data["seconds"] * data.get("repeat", 1) for _, data in graph.nodes(data=True))


def modules(graph: nx.DiGraph) -> set[str]:
    return {".".join(data["module"].split(".")[:2]) for _, data in graph.nodes(data=True)}


def test_a_deep_transformer_folds_to_one_layer() -> None:
    folded = fold_repeats(transformer(32))
    assert len(folded) == len(transformer(1))
    assert modules(folded) == {"", "embed", "head", "layers.0-31"}
    repeats = {data["repeat"] for _, data in folded.nodes(data=True) if "0-31" in data["module"]}
    assert repeats == {32}


def test_what_folding_hides_still_counts() -> None:
    graph = transformer(5)
    assert make_scene(graph).totals == tuple(totals(graph))
    folded = fold_repeats(graph)
    assert abs(seconds(folded) - seconds(graph)) < 1e-12


def test_two_alike_are_not_a_run() -> None:
    assert len(fold_repeats(transformer(2))) == len(transformer(2))


def test_a_layer_that_differs_ends_the_run() -> None:
    graph = transformer(9)
    graph.nodes["layers_4_sdpa"]["layout"] = "bf16[256@dp, 32, 2048, 128]"
    assert modules(fold_repeats(graph)) == {"", "embed", "head", "layers.0-3", "layers.4", "layers.5-8"}


def test_a_collective_that_differs_ends_the_run() -> None:
    graph = transformer(8)
    graph.edges["layers_6_o", "layers_6_add1"]["collective"] = "all_reduce[tp]()"
    assert modules(fold_repeats(graph)) == {"", "embed", "head", "layers.0-5", "layers.6", "layers.7"}


def test_layers_with_a_detour_between_them_are_not_folded_into_a_cycle() -> None:
    graph = nx.DiGraph()
    for name, module in [("a", "l.0"), ("b", "l.1"), ("outside", "x"), ("c", "l.2")]:
        graph.add_node(
            name, label="op", kind="op", layout="f32[2]", seconds=1.0, phase="forward", module=module
        )
    graph.add_edges_from([("a", "outside"), ("outside", "b"), ("outside", "c")], collective="", layout="")
    graph.add_node("in", label="in", kind="input", layout="", seconds=0.0, phase="forward", module="")
    graph.add_edge("in", "a", collective="", layout="")
    folded = fold_repeats(graph)
    assert nx.is_directed_acyclic_graph(folded)
    assert set(folded) == set(graph)


def test_a_graph_without_layers_is_itself() -> None:
    assert nx.utils.graphs_equal(fold_repeats(mlp()), mlp())
