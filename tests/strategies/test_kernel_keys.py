"""An op is timed as one thing, whether it stands in the global graph or in a rank's."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autoshard.planning import canonical_capture, find_plan
from cost_model.mesh import MeshSpec, simulated_groups
from cost_model.timed import KernelKey, KernelWork, TimedKernel, TimedPrices
from passes.ir.joint import node_value, tensor_operands
from passes.ir.op_work import kernel_form, kernel_key, local_key, may_be_timed
from passes.layout.layout import Assignment
from passes.lower.rank_program import rank_program
from tests.profiles import slow_compute

aten = torch.ops.aten


def global_keys(joint: fx.Graph, assignment: Assignment, mesh: MeshSpec) -> dict[str, KernelKey]:
    found: dict[str, KernelKey] = {}
    for node in joint.nodes:
        if node.op == "call_function" and may_be_timed(node, fused=False):
            layouts, operands = assignment[node.name].operands, tensor_operands(node)
            shape = lambda i, held=layouts, read=operands: held[i].max_local_shape(
                node_value(read[i]).shape, mesh
            )
            found[node.name] = kernel_key(node, kernel_form(node), shape)
    return found


@pytest.mark.parametrize("axes", [{"x": 2}, {"dp": 2, "tp": 2}])
def test_the_search_prices_what_a_rank_runs(axes: dict[str, int]) -> None:
    """Every op of the graph that can be timed has, under its layouts, the key of an op of rank 0."""
    mesh = MeshSpec(axes)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))
    inputs = (torch.randn(8, 16),)
    plan = find_plan(model, mesh, inputs, profile=slow_compute(), backend="eager")
    joint = canonical_capture(model, inputs, {}).joint
    expected = global_keys(joint.graph, plan.planned.layouts, mesh)
    local = rank_program(joint, plan.planned, mesh, 0, simulated_groups(mesh)).local
    mine = {
        local_key(n)
        for n in local.module.graph.nodes
        if n.op == "call_function" and may_be_timed(n, fused=False)
    }
    run = {(key.form, key.shapes) for key in mine}
    assert len(expected) > 20
    assert not [name for name, key in expected.items() if (key.form, key.shapes) not in run]


def test_convolutions_that_are_split_in_space_are_near_what_a_rank_runs() -> None:
    """With halos, and not padded where they are, they have other shapes, and the same form."""
    torch.manual_seed(0)
    mesh = MeshSpec({"x": 2})
    model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
    inputs = (torch.randn(1, 2, 32, 32),)
    plan = find_plan(model, mesh, inputs, profile=slow_compute(), backend="eager")
    joint = canonical_capture(model, inputs, {}).joint
    convolutions = [n for n in joint.graph.nodes if "convolution" in str(n.target)]
    assert any(any(held.halos) for n in convolutions for held in plan.planned.layouts[n.name].operands)
    local = rank_program(joint, plan.planned, mesh, 0, simulated_groups(mesh)).local
    run = [local_key(n) for n in local.module.graph.nodes if "convolution" in str(n.target)]
    work = KernelWork(1.0, 1.0, "float32")
    timed = TimedPrices(tuple(TimedKernel(key, work, 1.0) for key in run))
    keys = global_keys(joint.graph, plan.planned.layouts, mesh)
    assert len(convolutions) > 3
    found = {timed.priced(keys[n.name]) for n in convolutions}
    assert "near" in found and "modelled" not in found


def call(target: object, *operands: torch.Tensor, **others: object) -> fx.Node:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(operands))]
    for node, value in zip(nodes, operands, strict=True):
        node.meta["val"] = value
    return graph.call_function(target, (*nodes, *others.pop("args", ())), others)  # type: ignore[arg-type]


def test_numbers_and_devices_do_not_count_and_dims_do() -> None:
    x = torch.ones(2, 3)
    forms = [
        kernel_form(call(aten.mul.Tensor, x, args=(2.0,))),
        kernel_form(call(aten.mul.Tensor, x, args=(3.5,))),
        kernel_form(call(aten.sum.dim_IntList, x, args=([0],))),
        kernel_form(call(aten.sum.dim_IntList, x, args=([1],))),
        kernel_form(call(aten.sum.dim_IntList, x.double(), args=([1],))),
    ]
    assert forms[0] == forms[1] == "aten.mul.Tensor(torch.float32, float)"
    assert len(set(forms)) == 4


def test_strides_count_by_their_order() -> None:
    x = torch.ones(4, 6)
    keys = [
        local_key(call(aten.relu.default, value))
        for value in (x, x.t().contiguous().t(), torch.ones(4, 12)[:, :6])
    ]
    assert [key.orders for key in keys] == [((0, 1),), ((1, 0),), ((0, 1),)]
    assert local_key(call(aten.relu.default, torch.ones(1, 6))).orders == ((1,),)


def test_what_may_be_timed() -> None:
    x, index = torch.ones(4, 4), torch.zeros(4, 4, dtype=torch.long)
    product, relu = call(aten.mm.default, x, x), call(aten.relu.default, x)
    looked_up = call(aten.gather.default, x, args=(0,))
    looked_up.args = (looked_up.args[0], 0, looked_up.graph.placeholder("i"))
    looked_up.args[2].meta["val"] = index  # type: ignore[union-attr]
    view = call(aten.view.default, x, args=([16],))
    assert [may_be_timed(node, fused=False) for node in (product, relu, looked_up, view)] == [
        True,
        True,
        False,
        False,
    ]
    assert [may_be_timed(node, fused=True) for node in (product, relu)] == [True, False]
