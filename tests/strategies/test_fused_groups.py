"""Fused groups are what a compiler runs as one loop, and are told by one form in the global graph and in a rank's."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autoshard.planning import canonical_capture, find_plan
from cost_model.mesh import MeshSpec, simulated_groups
from passes.lower.rank_program import rank_program
from passes.strategies import traffic as fused_groups
from passes.strategies.traffic import fused_group, fused_traffic, grouped_traffic
from tests.profiles import slow_compute

aten = torch.ops.aten


class Chain(fx.Graph):
    """A graph that is written op by op, all in one phase."""

    def given(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: object, *args: object) -> fx.Node:
        node = self.call_function(target, args)  # type: ignore[arg-type]
        held = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta.update(val=target(*held), phase="forward")  # type: ignore[operator]
        return node


def softmax() -> tuple[Chain, dict[str, fx.Node]]:
    """exp(x - max) / sum, of a product, and a product of it."""
    graph = Chain()
    x, w = graph.given("x", torch.rand(4, 6)), graph.given("w", torch.rand(6, 6))
    nodes = {"scores": graph.call(aten.mm.default, x, w)}
    nodes["max"] = graph.call(aten.amax.default, nodes["scores"], [1], True)
    nodes["less"] = graph.call(aten.sub.Tensor, nodes["scores"], nodes["max"])
    nodes["exp"] = graph.call(aten.exp.default, nodes["less"])
    nodes["sum"] = graph.call(aten.sum.dim_IntList, nodes["exp"], [1], True)
    nodes["share"] = graph.call(aten.div.Tensor, nodes["exp"], nodes["sum"])
    nodes["flat"] = graph.call(aten.view.default, nodes["share"], [4, 6])
    nodes["end"] = graph.call(aten.mm.default, nodes["flat"], w)
    graph.output((nodes["end"],))
    return graph, nodes


def test_what_is_stored_takes_what_it_reads_into_its_loop() -> None:
    _, of = softmax()
    share = fused_group(of["share"])
    assert share is not None
    assert share.ops == (of["less"], of["exp"], of["share"])
    assert share.operands == (of["scores"], of["max"], of["sum"])
    total = fused_group(of["sum"])
    assert total is not None and total.ops == (of["less"], of["exp"], of["sum"])
    assert list(total.inner) == [of["less"], of["exp"]]
    assert fused_group(of["end"]) is None, "a product is a kernel of its own"


def test_a_form_names_ops_and_dtypes_and_no_sizes() -> None:
    _, of = softmax()
    group = fused_group(of["share"])
    assert group is not None
    assert group.form == (
        "aten.sub.Tensor(torch.float32, torch.float32); aten.exp.default(%0); aten.div.Tensor(%1, torch.float32)"
    )


def test_views_in_a_loop_are_part_of_it_and_only_those_that_turn_are_of_its_form() -> None:
    def group(view: object, *args: object) -> fused_groups.FusedGroup:
        graph = Chain()
        doubled = graph.call(aten.mul.Tensor, graph.given("x", torch.rand(4, 4)), 2.0)
        seen = graph.call(view, doubled, *args)
        end = graph.call(aten.neg.default, seen)
        graph.output((end,))
        found = fused_group(end)
        assert found is not None and found.ops == (doubled, seen, end)
        return found

    flat, longer, turned = (
        group(aten.view.default, [16]),
        group(aten.view.default, [2, 8]),
        group(aten.t.default),
    )
    assert flat.form == longer.form == "aten.mul.Tensor(torch.float32, float); aten.neg.default(%0)"
    assert turned.form == "aten.mul.Tensor(torch.float32, float); aten.t.default(%0); aten.neg.default(%1)"


def test_what_cannot_be_run_on_invented_values_is_none() -> None:
    graph = Chain()
    x, index = graph.given("x", torch.rand(4, 4)), graph.given("i", torch.zeros(4, 4, dtype=torch.long))
    looked_up = graph.call(aten.gather.default, x, 1, index)
    after = graph.call(aten.neg.default, looked_up)
    ones = graph.call(aten.full.default, [4, 4], 1.0)
    graph.output((after, ones))
    assert fused_group(after) is None
    assert fused_group(ones) is None, "it reads nothing"


def test_a_loop_of_more_ops_than_a_compiler_takes_is_none() -> None:
    def chain(count: int) -> fx.Node:
        graph = Chain()
        node = graph.given("x", torch.rand(2))
        for _ in range(count):
            node = graph.call(aten.neg.default, node)
        graph.output((node,))
        return node

    assert fused_group(chain(fused_groups.MOST_OPS)) is not None
    assert fused_group(chain(fused_groups.MOST_OPS + 1)) is None
    assert fused_group(chain(5_000)) is None


@pytest.mark.parametrize("axes", [{"x": 2}, {"dp": 2, "tp": 2}])
def test_the_search_prices_groups_that_a_rank_runs(axes: dict[str, int]) -> None:
    """Most: where a redistribution comes between, the rank runs two."""
    mesh = MeshSpec(axes)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16), nn.Softmax(-1))
    inputs = (torch.randn(4096, 16),)
    plan = find_plan(model, mesh, inputs, profile=slow_compute(), backend="inductor")
    joint = canonical_capture(model, inputs, {}).joint
    expected = forms(joint.graph)
    phases = rank_program(joint, plan.planned, mesh, 0, simulated_groups(mesh)).usual()
    assert phases.backward is not None
    run = forms(phases.forward.graph) | forms(phases.backward.module.graph)
    assert len(expected) > 8
    assert len(expected & run) >= 0.6 * len(expected), expected - run


def forms(graph: fx.Graph) -> set[str]:
    return {
        flow.group
        for node in graph.nodes
        if node.op == "call_function" and (flow := grouped_traffic(node)).group
    }


def test_traffic_is_as_without_groups() -> None:
    _, of = softmax()
    for node in of.values():
        grouped, flow = grouped_traffic(node), fused_traffic(node)
        assert (grouped.reads, grouped.writes) == (flow.reads, flow.writes)
    assert [bool(grouped_traffic(of[name]).group) for name in ("exp", "sum", "share", "end")] == [
        False,
        True,
        True,
        False,
    ]
