"""Backwards specialised for outputs without gradient."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.ir.joint import GraphInput, GraphOutput
from passes.lower.phases import split_phases
from passes.lower.rank_program import without_tangents
from tests.runtime.graphs import Local
from tests.runtime.splitting import Block, primitive_joint, random_values, run_backward, split, targets

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_tangent_is_a_zero(missing: int) -> None:
    joint = primitive_joint(Block(), [torch.randn(2, 5, 8)])
    phases = split(joint)
    assert phases.backward is not None
    values = random_values(joint)
    tangents = {i.index: v for v, i in zip(values, joint.inputs, strict=True) if i.kind == "tangent"}
    leaves = values[: -len(tangents)]
    results = phases.forward(*leaves)
    special = without_tangents(phases.backward, {missing})
    assert len(special.tangents) == 1
    assert len(targets(special.module)) < len(targets(phases.backward.module))
    zeroed = {**tangents, missing: torch.zeros_like(tangents[missing])}
    expected = run_backward(phases.backward, leaves, results, zeroed)
    for got, wanted in zip(run_backward(special, leaves, results, tangents), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_without_any_tangent_all_gradients_are_none() -> None:
    joint = primitive_joint(Block(), [torch.randn(2, 5, 8)])
    phases = split(joint)
    assert phases.backward is not None
    special = without_tangents(phases.backward, {0, 1})
    assert targets(special.module) == [] and special.passed == () and special.saved == ()
    assert special.module() == (None,) * len(joint.module.graph.find_nodes(op="placeholder")[:-3])


def test_collectives_of_zeros_disappear() -> None:
    """Two outputs, each with its own reduce-scatter."""
    local = Local()
    w, v, one, two = (local.input(4, 4) for _ in range(4))
    outputs = [local.call(aten.mul.Tensor, w, 2.0), local.call(aten.mul.Tensor, v, 3.0)]

    def gradient(tangent: fx.Node) -> fx.Node:
        scattered = local.call(c10d.reduce_scatter_tensor.default, tangent, "sum", 2, "g")
        return local.call(c10d.wait_tensor.default, scattered)

    module = local.module(*outputs, gradient(one), gradient(two))
    phases = split_phases(
        module,
        [
            GraphInput("param", "w"),
            GraphInput("param", "v"),
            GraphInput("tangent", "tangent 0", 0),
            GraphInput("tangent", "tangent 1", 1),
        ],
        [
            GraphOutput("output", "a", 0),
            GraphOutput("output", "b", 1),
            GraphOutput("grad", "w", 0),
            GraphOutput("grad", "v", 1),
        ],
    )
    assert phases.backward is not None
    special = without_tangents(phases.backward, {1})
    assert sum("reduce_scatter" in t for t in targets(special.module)) == 1
    output = next(n for n in special.module.graph.nodes if n.op == "output")
    assert [r is None for r in output.args[0]] == [False, True]


def test_shape_only_readers_of_a_missing_tangent_are_kept() -> None:
    local = Local()
    w, one, two = (local.input(3) for _ in range(3))
    ones = local.call(aten.ones_like.default, two)
    grad = local.call(aten.mul.Tensor, one, ones)
    phases = split_phases(
        local.module(local.call(aten.sin.default, w), local.call(aten.cos.default, w), grad),
        [
            GraphInput("param", "w"),
            GraphInput("tangent", "tangent 0", 0),
            GraphInput("tangent", "tangent 1", 1),
        ],
        [GraphOutput("output", "a", 0), GraphOutput("output", "b", 1), GraphOutput("grad", "w")],
    )
    assert phases.backward is not None
    special = without_tangents(phases.backward, {1})
    t = torch.randn(3)
    (gradient,) = special.module(t)
    torch.testing.assert_close(gradient, t)
