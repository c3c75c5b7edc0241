"""Forward and backward as two programs: same values, nothing twice, the fewest bytes saved."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from passes.capture.trace import decomposition_table
from passes.ir.joint import GraphInput, GraphOutput, JointGraph
from passes.ir.op_traits import is_cheap
from passes.lower.phases import Phases, split_phases
from tests.runtime.graphs import Local, joint_of
from tests.runtime.splitting import (
    Block,
    primitive_joint,
    random_values,
    run,
    run_backward,
    saved_bytes,
    split,
    targets,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def test_two_graphs_compute_what_one_does() -> None:
    joint = primitive_joint(Block(), [torch.randn(2, 5, 8)])
    values = random_values(joint)
    for got, expected in zip(run(joint, split(joint), values), joint.module(*values), strict=True):
        torch.testing.assert_close(got, expected)


def test_splitting_is_deterministic_and_leaves_the_joint_graph_alone() -> None:
    joint = primitive_joint(Block(), [torch.randn(2, 5, 8)])
    before = str(joint.graph)
    one, two = split(joint), split(joint)
    assert str(joint.graph) == before
    assert str(one.forward.graph) == str(two.forward.graph)
    assert one.backward is not None and two.backward is not None
    assert str(one.backward.module.graph) == str(two.backward.module.graph)


def test_products_are_never_run_twice() -> None:
    joint = primitive_joint(Block(), [torch.randn(2, 5, 8)])
    phases = split(joint)
    assert phases.backward is not None
    for name in ("aten.mm.default", "aten.bmm.default"):
        parts = targets(phases.forward).count(name) + targets(phases.backward.module).count(name)
        assert parts == targets(joint.module).count(name)


def test_relu_saves_a_mask_of_one_byte() -> None:
    """y = relu(x).sum(): the backward needs the sign of x only; x itself is an input here, its double is not."""
    local = Local()
    x, w = local.input(64, 64), local.input(64, 64)
    tangent = local.input(64, 64)
    h = local.call(aten.mm.default, x, w)
    y = local.call(aten.relu.default, h)
    mask = local.call(aten.le.Scalar, y, 0)
    zero = local.call(aten.full.default, [], 0.0)
    grad = local.call(aten.where.self, mask, zero, tangent)
    module = local.module(local.call(aten.sum.default, y), grad)
    phases = split_phases(
        module,
        [GraphInput("input", "x"), GraphInput("input", "w", 1), GraphInput("tangent", "tangent 0")],
        [GraphOutput("output", "output 0"), GraphOutput("grad", "x")],
    )
    assert saved_bytes(phases) == 64 * 64


def test_a_pointwise_value_read_by_a_product_is_saved_not_computed_again() -> None:
    """gelu(h) @ w: torch.compile saves both h (for gelu's derivative) and gelu(h) (for w's gradient)."""

    def mlp(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor]:
        return (F.gelu(x @ p["up"]) @ p["down"],)

    params = {"up": torch.randn(8, 32), "down": torch.randn(32, 8)}
    joint = joint_of(mlp, params, [torch.randn(6, 8)], 1, decomposition_table())
    phases = split(joint)
    assert saved_bytes(phases) == 2 * 6 * 32 * 4
    assert phases.backward is not None
    assert "aten.gelu.default" not in targets(phases.backward.module)


@pytest.mark.parametrize("fused", [True, False])
def test_a_compiler_saves_the_product_and_not_its_sum_with_a_bias(fused: bool) -> None:
    """As many bytes either way: the product is stored in any case, and op by op fewer are run again."""
    local = Local()
    x, w, b, tangent = local.input(6, 8), local.input(8, 5), local.input(5), local.input(6, 5)
    h = local.call(aten.add.Tensor, local.call(aten.mm.default, x, w), b)
    grad = local.call(aten.mul.Tensor, tangent, local.call(aten.cos.default, h))
    phases = split_phases(
        local.module(local.call(aten.sin.default, h), grad),
        [*(GraphInput("input", n, i) for i, n in enumerate("xwb")), GraphInput("tangent", "tangent 0")],
        [GraphOutput("output", "output 0"), GraphOutput("grad", "b", 2)],
        fused=fused,
    )
    assert saved_bytes(phases) == 6 * 5 * 4
    assert phases.backward is not None
    assert targets(phases.backward.module).count("aten.add.Tensor") == fused


def test_a_sum_of_two_products_is_saved_itself() -> None:
    """Adding them again reads as many bytes as storing the sum and reading it."""
    local = Local()
    x, w, v, tangent = (local.input(6, 6) for _ in range(4))
    h = local.call(aten.add.Tensor, local.call(aten.mm.default, x, w), local.call(aten.mm.default, x, v))
    grad = local.call(aten.mul.Tensor, tangent, local.call(aten.cos.default, h))
    phases = split_phases(
        local.module(local.call(aten.sin.default, h), grad),
        [*(GraphInput("input", n, i) for i, n in enumerate("xwv")), GraphInput("tangent", "tangent 0")],
        [GraphOutput("output", "output 0"), GraphOutput("grad", "v", 2)],
    )
    assert phases.backward is not None
    assert saved_bytes(phases) == 6 * 6 * 4
    assert "aten.add.Tensor" not in targets(phases.backward.module)


def test_views_are_not_saved_but_what_they_view() -> None:
    """x.t() @ w and its gradient need x.t(): x is an input, which costs nothing."""

    def product(p: dict[str, Tensor], x: Tensor) -> tuple[Tensor]:
        return (x.t() @ p["w"],)

    joint = joint_of(product, {"w": torch.randn(4, 5)}, [torch.randn(4, 3)], 1)
    phases = split(joint)
    assert phases.backward is not None
    assert phases.backward.saved == () and phases.backward.passed == (1,)


def gather_twice() -> tuple[fx.GraphModule, list[GraphInput], list[GraphOutput]]:
    """ZeRO-3: the weight is gathered for the forward and once more for the backward."""
    local = Local()
    w, x, tangent = local.input(2, 8), local.input(6, 4), local.input(6, 8)
    first = local.call(c10d.wait_tensor.default, local.call(c10d.all_gather_into_tensor.default, w, 2, "g"))
    y = local.call(aten.mm.default, x, first)
    again = local.call(c10d.wait_tensor.default, local.call(c10d.all_gather_into_tensor.default, w, 2, "g"))
    grad_x = local.call(aten.mm.default, tangent, local.call(aten.t.default, again))
    grad_w = local.call(aten.mm.default, local.call(aten.t.default, x), tangent)
    scattered = local.call(c10d.reduce_scatter_tensor.default, grad_w, "sum", 2, "g")
    grad_w = local.call(c10d.wait_tensor.default, scattered)
    module = local.module(y, grad_w, grad_x)
    inputs = [GraphInput("param", "w"), GraphInput("input", "x"), GraphInput("tangent", "tangent 0")]
    outputs = [GraphOutput("output", "y"), GraphOutput("grad", "w"), GraphOutput("grad", "x", 1)]
    return module, inputs, outputs


def test_a_second_gather_stays_in_the_backward_right_before_its_use() -> None:
    phases = split_phases(*gather_twice())
    assert phases.backward is not None
    assert saved_bytes(phases) == 0
    assert targets(phases.forward) == [
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.wait_tensor.default",
        "aten.mm.default",
    ]
    assert targets(phases.backward.module) == [
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.wait_tensor.default",
        "aten.t.default",
        "aten.mm.default",
        "aten.t.default",
        "aten.mm.default",
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.wait_tensor.default",
    ]


def test_a_gathered_value_the_backward_needs_is_saved_not_gathered_again() -> None:
    local = Local()
    w, x, tangent = local.input(2, 8), local.input(6, 4), local.input(6, 8)
    whole = local.call(c10d.wait_tensor.default, local.call(c10d.all_gather_into_tensor.default, w, 2, "g"))
    y = local.call(aten.mm.default, x, whole)
    grad = local.call(aten.mm.default, tangent, local.call(aten.t.default, whole))
    phases = split_phases(
        local.module(y, grad),
        [GraphInput("param", "w"), GraphInput("input", "x"), GraphInput("tangent", "tangent 0")],
        [GraphOutput("output", "y"), GraphOutput("grad", "x", 1)],
    )
    assert phases.backward is not None
    assert saved_bytes(phases) == 4 * 8 * 4
    assert not any("all_gather" in t for t in targets(phases.backward.module))


def test_a_buffer_that_is_overwritten_is_saved_as_it_was() -> None:
    local = Local()
    buffer, x, tangent = local.input(4), local.input(4), local.input(4)
    new = local.call(aten.add.Tensor, buffer, x)
    y = local.call(aten.mul.Tensor, x, buffer)
    grad = local.call(aten.mul.Tensor, tangent, buffer)
    phases = split_phases(
        local.module(y, new, grad),
        [GraphInput("buffer", "b"), GraphInput("input", "x"), GraphInput("tangent", "tangent 0")],
        [GraphOutput("output", "y"), GraphOutput("buffer", "b", 0), GraphOutput("grad", "x", 1)],
    )
    assert phases.backward is not None and phases.backward.passed == ()
    b, t = torch.randn(4), torch.randn(4)
    leaves, old = [b, torch.randn(4)], b.clone()
    results = phases.forward(*leaves)
    b.copy_(results[1])
    (gradient,) = run_backward(phases.backward, leaves, results, {0: t})
    torch.testing.assert_close(gradient, t * old)


def test_nothing_returned_shares_storage() -> None:
    """An input returned as it is, a value returned twice, and one gradient for two inputs."""
    local = Local()
    x, y, tangent = local.input(4), local.input(4), local.input(4)
    z = local.call(aten.add.Tensor, x, y)
    doubled = local.call(aten.mul.Tensor, tangent, 2.0)
    phases = split_phases(
        local.module(x, z, z, doubled, doubled, tangent),
        [GraphInput("input", "x"), GraphInput("input", "y", 1), GraphInput("tangent", "tangent 1", 1)],
        [
            *(GraphOutput("output", f"output {i}", i) for i in range(3)),
            *(GraphOutput("grad", n, i) for n, i in (("x", 0), ("y", 1), ("y", 1))),
        ],
    )
    assert phases.backward is not None
    leaves, t = [torch.randn(4), torch.randn(4)], torch.randn(4)
    results = phases.forward(*leaves)
    gradients = run_backward(phases.backward, leaves, results, {1: t})
    tensors = [*leaves, *results, *gradients, t]
    assert len({v.data_ptr() for v in tensors if v is not None}) == len(tensors)


@pytest.mark.parametrize(("rows", "copied"), [(0, True), (1, True), (2, True), (3, False), (4, False)])
def test_a_part_of_a_gradient_does_not_keep_the_whole(rows: int, copied: bool) -> None:
    """Of a product of 4 rows. More than half of it is no less without a copy."""
    local = Local()
    x, tangent = local.input(4, 4), local.input(4, 4)
    whole = local.call(aten.mm.default, x, tangent)
    part = local.call(aten.slice.Tensor, whole, 0, 0, rows)
    phases = split_phases(
        local.module(local.call(aten.relu.default, x), part),
        [GraphInput("input", "x"), GraphInput("tangent", "tangent 0")],
        [GraphOutput("output", "output 0"), GraphOutput("grad", "x")],
    )
    assert phases.backward is not None
    leaves, t = [torch.randn(4, 4)], torch.randn(4, 4)
    (gradient,) = run_backward(phases.backward, leaves, phases.forward(*leaves), {0: t})
    torch.testing.assert_close(gradient, (leaves[0] @ t)[:rows])
    assert gradient is not None
    assert gradient.untyped_storage().nbytes() == 16 * (rows if copied else 4)


def without_grad() -> Phases:
    local = Local()
    x = local.input(4)
    return split_phases(
        local.module(local.call(aten.relu.default, x)),
        [GraphInput("input", "x")],
        [GraphOutput("output", "y")],
    )


def test_no_backward_without_gradients() -> None:
    assert without_grad().backward is None


# The cut is checked against all subsets on small random graphs.


def random_joint(seed: int) -> JointGraph:
    """A layered graph of cheap and costly ops; every gradient multiplies some forward values."""
    rng = random.Random(seed)
    local = Local()
    x, tangent = local.input(4, 4), local.input(4, 4)
    pool = [local.call(aten.mm.default, x, x)]
    for _ in range(rng.randint(2, 6)):
        one, two = rng.choice(pool), rng.choice(pool)
        op = rng.choice(["sin", "mm", "add", "half"])
        if op == "sin":
            pool.append(local.call(aten.sin.default, one))
        elif op == "mm":
            pool.append(local.call(aten.mm.default, one, two))
        elif op == "add":
            pool.append(local.call(aten.add.Tensor, one, two))
        else:
            half = local.call(aten._to_copy.default, one, dtype=torch.float16)
            pool.append(local.call(aten._to_copy.default, half, dtype=torch.float32))
    total = pool[0]
    for value in pool[1:]:
        total = local.call(aten.add.Tensor, total, value)
    grad = tangent
    for value in rng.sample(pool, min(len(pool), 3)):
        grad = local.call(aten.mul.Tensor, grad, value)
    module = local.module(total, grad)
    return JointGraph(
        module,
        (GraphInput("input", "x"), GraphInput("tangent", "tangent 0")),
        (GraphOutput("output", "y"), GraphOutput("grad", "x")),
    )


def brute_force_bytes(joint: JointGraph) -> int:
    """The least bytes of a set of forward values from which the gradient follows by cheap ops."""
    y, grad = joint.results
    assert y is not None and grad is not None
    forward = [n for n in joint.graph.nodes if n.op == "call_function" and n in _ancestors(y)]
    sizes = [n.meta["val"].numel() * n.meta["val"].element_size() for n in forward]
    best = sum(sizes)
    for chosen in range(1 << len(forward)):
        saved = {n for i, n in enumerate(forward) if chosen >> i & 1}
        cost = sum(s for s, n in zip(sizes, forward, strict=True) if n in saved and n is not y)
        if cost < best and _follows(grad, saved, set(forward)):
            best = cost
    return best


def _follows(node: fx.Node, saved: set[fx.Node], forward: set[fx.Node]) -> bool:
    if node.op == "placeholder" or node in saved:
        return True
    if node in forward and not is_cheap(node):
        return False
    return all(_follows(n, saved, forward) for n in node.all_input_nodes)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found = {node}
    for operand in node.all_input_nodes:
        found |= _ancestors(operand)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_the_saved_bytes_are_the_least_possible(seed: int) -> None:
    joint = random_joint(seed)
    phases = split(joint)
    assert saved_bytes(phases) == brute_force_bytes(joint)
    values = random_values(joint)
    for got, expected in zip(run(joint, phases, values), joint.module(*values), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


# Missing tangents
