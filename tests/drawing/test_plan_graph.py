"""Records of a plan become nodes and edges; redistributions are on the edges, each priced once."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
from msgspec.structs import replace

from autoshard.plan.plan_graph import plan_graph
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from passes.plan.planned_graph import NodeRecord, OperandRecord, PlannedGraph, Reshard, ResultRecord
from passes.redistribution.steps import STEPS

MESH = MeshSpec({"dp": 2, "tp": 4})
WHOLE = Layout.replicated(2)
ROWS = Layout((("dp",), ()))


def transfer(kind: str, seconds: float, nbytes: int = 64) -> Reshard:
    make = STEPS[kind]
    given = {"dim": 0, "op": "sum"}
    arguments = {name: given[name] for name in make.argument_names()}
    return Reshard.of(make(before=ROWS, after=WHOLE, axes=("dp",), **arguments), nbytes, seconds)


def graph_of(records: Sequence[NodeRecord], mesh: MeshSpec = MESH) -> nx.DiGraph:
    return plan_graph(PlannedGraph(tuple(records)), mesh)


def read(source: str, *transfers: Reshard, layout: Layout = WHOLE) -> OperandRecord:
    return OperandRecord(source, 0, layout, transfers, hides=False)


def record(name: str, op: str, *operands: OperandRecord, text: str = "", module: str = "") -> NodeRecord:
    results = () if op == "output" else (ResultRecord((8, 16), "f32", ROWS),)
    return NodeRecord(name, op, text, operands, results, (), 1e-6, "forward", module, "m.py:3")


def test_nodes_carry_what_the_plan_says() -> None:
    graph = graph_of(
        [
            record("p", "param", text="param net.{{0}}.weight"),
            record("y", "aten.relu", read("p"), module="net"),
        ],
        MESH,
    )
    assert graph.graph["mesh"] == "mesh (dp=2, tp=4)"
    assert graph.nodes["p"]["label"] == "net.{0}.weight"
    assert (graph.nodes["p"]["kind"], graph.nodes["p"]["module"]) == ("param", "net.{0}")
    assert graph.nodes["y"] == {
        "label": "aten.relu",
        "kind": "op",
        "layout": "f32[8@dp, 16]",
        "seconds": 1e-6,
        "phase": "forward",
        "module": "net",
        "source": "m.py:3",
    }


def test_an_edge_carries_its_collectives_and_leaves_local_steps_out() -> None:
    graph = graph_of(
        [
            record("x", "input", text="input x"),
            record(
                "y",
                "aten.relu",
                read(
                    "x",
                    transfer("slice", 0.0, 0),
                    transfer("all_gather", 2.0),
                    transfer("all_reduce", 1.0, 8),
                ),
            ),
        ],
        MESH,
    )
    assert graph.edges["x", "y"] == {
        "layout": "[-, -]",
        "collective": "all_gather[dp](dim=0); all_reduce[dp]()",
        "seconds": 3.0,
        "nbytes": 72,
        "each_kind": "all_gather; all_reduce",
        "each_axes": "dp; dp",
        "each_seconds": "2.0; 1.0",
        "each_nbytes": "64; 8",
        "each_bucket": "-; -",
    }


def test_collectives_of_one_turn_and_kind_are_a_bucket() -> None:
    in_turn = lambda source, *transfers: replace(read(source, *transfers), turn=(0, 3))
    graph = graph_of(
        [
            record("x", "input", text="input x"),
            record("w", "param", text="param w"),
            record("y", "contract", in_turn("x", transfer("all_gather", 2.0), transfer("all_reduce", 1.0))),
            record("z", "contract", read("y"), in_turn("w", transfer("all_gather", 0.5, 16))),
        ],
        MESH,
    )
    assert graph.edges["x", "y"]["each_bucket"] == "0.3 80 2.5; -"
    assert graph.edges["w", "z"]["each_bucket"] == "0.3 80 2.5"
    assert graph.edges["y", "z"]["each_bucket"] == ""


def test_a_value_read_twice_by_one_op_is_one_edge_with_both_layouts() -> None:
    graph = graph_of(
        [
            record("x", "input", text="input x"),
            record("y", "contract", read("x", transfer("all_gather", 2.0)), read("x", layout=ROWS)),
        ],
        MESH,
    )
    edge = graph.edges["x", "y"]
    assert (edge["layout"], edge["collective"], edge["seconds"]) == (
        "[-, -]; [@dp, -]",
        "all_gather[dp](dim=0)",
        2.0,
    )


def test_a_use_that_moves_nothing_or_for_one_reader_is_left_out() -> None:
    records = [
        record("x", "input", text="input x"),
        record("idle", "use", read("x")),
        record("a", "aten.relu", read("idle")),
        record("b", "aten.relu", read("idle", transfer("all_reduce", 1.0))),
        record("single", "use", read("a", transfer("all_gather", 2.0))),
        record("c", "aten.relu", read("single", transfer("all_reduce", 1.0))),
    ]
    graph = graph_of(records)
    assert set(graph) == {"x", "a", "b", "c"}
    assert graph.edges["x", "b"]["collective"] == "all_reduce[dp]()"
    assert graph.edges["a", "c"]["collective"] == "all_gather[dp](dim=0); all_reduce[dp]()"


def test_a_use_that_gathers_for_several_readers_stays_and_is_priced_once() -> None:
    records = [
        record("x", "input", text="input x"),
        record("shared", "use", read("x", transfer("all_gather", 2.0))),
        record("a", "aten.relu", read("shared"), module="net.a"),
        record("b", "aten.relu", read("shared"), module="net.b"),
    ]
    graph = graph_of(records)
    assert graph.nodes["shared"]["module"] == "net.a"
    assert sum(edge["seconds"] for *_, edge in graph.edges(data=True)) == 2.0


def test_several_results_are_all_named() -> None:
    both = NodeRecord(
        "s",
        "split",
        "",
        (),
        (ResultRecord((2, 2), "f32", WHOLE), ResultRecord((4, 2), "f32", ROWS)),
        (),
        0.0,
        "forward",
        "",
        "",
    )
    assert graph_of([both]).nodes["s"]["layout"] == "f32[2, 2]; f32[4@dp, 2]"


def test_every_attribute_is_plain() -> None:
    graph = graph_of([record("x", "input", text="input x"), record("output", "output", read("x"))], MESH)
    values = [value for _, data in graph.nodes(data=True) for value in data.values()]
    values += [value for *_, data in graph.edges(data=True) for value in data.values()]
    assert all(isinstance(value, (str, int, float)) for value in values)
    assert nx.is_directed_acyclic_graph(graph)
