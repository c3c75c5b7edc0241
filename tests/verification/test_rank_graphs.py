"""What holds of a rank's graph, and what its passes keep: each with a graph or a pass that is against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from passes.ir.graph_pass import RankPass, run_rank_passes
from passes.ir.graph_properties import (
    COLLECTIVES,
    COMPUTING,
    OPS,
    RANK_INVARIANTS,
    BrokenGraphError,
    Property,
)
from passes.schedule.bucket import MERGED
from passes.schedule.overlap import IN_TURN
from passes.schedule.schedule import ONE_GROUP_IN_FLIGHT
from tests.runtime.graphs import Local

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
_, VALUES, WAITS = RANK_INVARIANTS


def start(g: Local, x: fx.Node, group: str = "axes:tp", turn: int = 0) -> fx.Node:
    node = g.call(c10d.all_reduce.default, x, "sum", group)
    node.meta["turn"] = (0, turn)
    return node


def wait(g: Local, started: fx.Node) -> fx.Node:
    return g.call(c10d.wait_tensor.default, started)


def no_value() -> fx.GraphModule:
    g = Local()
    node = g.call(aten.relu.default, g.input(4))
    del node.meta["val"]
    return g.module(node)


def never_awaited() -> fx.GraphModule:
    g = Local()
    x = g.input(4)
    start(g, x)
    return g.module(g.call(aten.relu.default, x))


def awaited_twice() -> fx.GraphModule:
    g = Local()
    started = start(g, g.input(4))
    return g.module(wait(g, started), wait(g, started))


def read_in_flight() -> fx.GraphModule:
    g = Local()
    started = start(g, g.input(4))
    return g.module(wait(g, started), g.call(aten.relu.default, started))


def waits_for_nothing() -> fx.GraphModule:
    g = Local()
    return g.module(wait(g, g.input(4)))


def two(turns: tuple[int, int] = (0, 1), groups: tuple[str, str] = ("axes:tp", "axes:tp")) -> fx.GraphModule:
    """Two all-reduces in flight together, of two products."""
    g = Local()
    x, w = g.input(4, 4), g.input(4, 4)
    started = [
        start(g, g.call(aten.mm.default, a, b), group, turn)
        for (a, b), group, turn in zip(((x, w), (w, x)), groups, turns, strict=True)
    ]
    return g.module(*[wait(g, one) for one in started])


CASES: list[tuple[Property[Any], Callable[[], fx.GraphModule], str]] = [
    (VALUES, no_value, "%relu_default = aten.relu.default(%arg0): has none"),
    (WAITS, never_awaited, "is read by [], not by its wait alone"),
    (
        WAITS,
        awaited_twice,
        "is read by ['wait_tensor_default', 'wait_tensor_default_1'], not by its wait alone",
    ),
    (WAITS, read_in_flight, "is read by ['wait_tensor_default', 'relu_default'], not by its wait alone"),
    (WAITS, waits_for_nothing, "waits for no collective"),
    (IN_TURN, lambda: two((1, 0)), "has turn (0, 0), and stands behind %all_reduce_default with (0, 1)"),
    (MERGED, lambda: two((1, 1)), "could go with %all_reduce_default"),
    (
        ONE_GROUP_IN_FLIGHT,
        lambda: two(groups=("axes:tp", "axes:dp")),
        "starts while %all_reduce_default of axes:tp is in flight",
    ),
]


@pytest.mark.parametrize(("stated", "graph", "said"), CASES, ids=[case[2] for case in CASES])
def test_a_violation_is_found_and_named(
    stated: Property[Any], graph: Callable[[], fx.GraphModule], said: str
) -> None:
    found = stated.violation(graph())
    assert found is not None and found.endswith(said)
    assert stated.violation(two()) is None


@dataclass(frozen=True)
class Keeps(RankPass):
    """Does `change` to the graph, and says that it keeps everything."""

    change: Callable[[fx.Graph], None]
    keeps = (OPS, COMPUTING, COLLECTIVES)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        self.change(module.graph)
        return module


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def swap_operands(graph: fx.Graph) -> None:
    product = named(graph, "mm_default")
    product.args = product.args[::-1]


def swap_starts(graph: fx.Graph) -> None:
    named(graph, "wait_tensor_default").prepend(named(graph, "all_reduce_default"))


def other_op(graph: fx.Graph) -> None:
    named(graph, "mm_default").target = aten.add.Tensor


def wait_first(graph: fx.Graph) -> None:
    named(graph, "all_reduce_default").prepend(named(graph, "wait_tensor_default"))


@pytest.mark.parametrize(
    ("kept", "change", "said"),
    [
        ((OPS,), swap_operands, "keeps keeps: all nodes and their operands\n  was %mm_default"),
        (
            (COMPUTING,),
            other_op,
            "keeps keeps: the ops that neither move data nor communicate\n  was %mm_default",
        ),
        ((COLLECTIVES,), swap_starts, "keeps keeps: the collectives, in their order\n  was "),
        ((OPS,), wait_first, "keeps breaks: placeholders, ops, one output"),
    ],
)
def test_a_change_of_what_is_kept_is_found(
    kept: tuple[Any, ...], change: Callable[[fx.Graph], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keeps, "keeps", kept)
    with pytest.raises(BrokenGraphError) as error:
        run_rank_passes(two(groups=("axes:tp", "axes:dp")), [Keeps(change)])
    assert str(error.value).startswith(said)


def test_another_order_of_the_same_nodes_is_none() -> None:
    run_rank_passes(two(), [Keeps(swap_starts)])  # both in one group: the same list
