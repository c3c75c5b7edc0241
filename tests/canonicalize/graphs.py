"""Joint graphs for the tests of passes, traced without capture; and running and comparing them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from passes.canonicalize.normalize_arguments import NormalizeArguments
from passes.canonicalize.random_to_uniform import NormalizeCreations
from passes.canonicalize.remove_noops import RemoveDeadCode, RemoveNoops
from passes.capture.trace import decomposition_table
from passes.ir.graph_pass import GraphPass, copy_joint, run_passes
from passes.ir.graph_properties import INVARIANTS
from passes.ir.joint import GraphInput, GraphOutput, JointGraph

Function = Callable[..., Any]
Tensors = tuple[torch.Tensor, ...]


def joint_of(function: Function, *inputs: torch.Tensor, grads: bool = True) -> JointGraph:
    """`function`'s outputs, and the gradients of its float inputs, as one functional graph.

    Inputs are named x0, x1, ...; one tangent per float output.
    """
    outputs = _flat(function(*inputs))
    tangents = [torch.ones_like(y) for y in outputs if y.is_floating_point()] if grads else []
    count = len(inputs)

    floats = [i for i, x in enumerate(inputs) if x.is_floating_point()]

    def both(*arguments: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = list(arguments[:count])

        def differentiable(*varied: torch.Tensor) -> tuple[Tensors, Tensors]:
            for i, x in zip(floats, varied, strict=True):
                given[i] = x
            results = tuple(_flat(function(*given)))
            return tuple(y for y in results if y.is_floating_point()), results

        if not grads:
            return tuple(_flat(function(*given)))
        varied = (given[i] for i in floats)
        _, pull, results = cast(Any, torch.func.vjp(differentiable, *varied, has_aux=True))
        return (*results, *pull(tuple(arguments[count:])))

    traced = make_fx(
        torch.func.functionalize(both),
        decomposition_table=decomposition_table(),
        tracing_mode="fake",
    )(*inputs, *tangents)
    given = [GraphInput("input", f"x{i}", i) for i in range(count)]
    given += [GraphInput("tangent", f"tangent {i}", i) for i in range(len(tangents))]
    returned = [GraphOutput("output", f"y{i}", i) for i in range(len(outputs))]
    if grads:
        returned += [GraphOutput("grad", f"x{i}", i) for i in floats]
    _mark(traced.graph, len(outputs), count)
    return JointGraph(traced, tuple(given), tuple(returned))


def _mark(graph: fx.Graph, outputs: int, inputs: int) -> None:
    """Flat outputs; the phase of every op: forward unless it needs a tangent."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    backward = set(placeholders[inputs:])
    for node in graph.nodes:
        if node.op == "call_function":
            if any(operand in backward for operand in node.all_input_nodes):
                backward.add(node)
            node.meta |= {"phase": "backward" if node in backward else "forward", "module": "", "source": ""}
        elif node.op == "output":
            results = pytree.tree_leaves(node.args[0], is_leaf=lambda x: x is None)
            node.args = (tuple(None if r is None or "val" not in r.meta else r for r in results),)
    for node in reversed(list(graph.nodes)):  # a result that is None, as of a gradient that nobody asked for
        if node.op == "call_function" and "val" not in node.meta:
            graph.erase_node(node)


def _flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def run(joint: JointGraph, inputs: Sequence[torch.Tensor], seed: int = 0) -> list[torch.Tensor | None]:
    """The graph's results on `inputs` (one per input and tangent); a seed input gets `seed`."""
    extra = [torch.tensor(seed) for given in joint.inputs if given.kind == "seed"]
    return list(_Interpreter(joint.module).run(*inputs, *extra))


class _Interpreter(fx.Interpreter):
    """Runs `view` as `reshape`: a traced view may not fit the strides that an eager run gives."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        return super().call_function(target, args, kwargs)


def arguments(joint: JointGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`inputs`, and random tangents of the right shapes."""
    generator = torch.Generator().manual_seed(0)
    tangents = [
        torch.randn(node.meta["val"].shape, generator=generator, dtype=node.meta["val"].dtype)
        for given, node in zip(joint.inputs, joint.placeholders, strict=True)
        if given.kind == "tangent"
    ]
    return [*inputs, *tangents]


def assert_same(
    before: JointGraph, after: JointGraph, inputs: Sequence[torch.Tensor], **tolerance: float
) -> None:
    """Both graphs return the same values, dtypes and shapes."""
    given = arguments(before, inputs)
    for name, a, b in zip(before.outputs, run(before, given), run(after, given), strict=True):
        if a is None or b is None:
            assert a is b, f"{name}: one graph returns None"
        else:
            torch.testing.assert_close(b, a, msg=lambda text, name=name: f"{name}: {text}", **tolerance)  # type: ignore[misc]


def assert_valid(joint: JointGraph) -> None:
    """The invariants of every joint graph, and values of the shapes that the ops have."""
    for invariant in INVARIANTS:
        assert invariant.violation(joint) is None, f"{invariant.name}: {invariant.violation(joint)}"
    values = dict(_interpreted_shapes(joint))
    for node, shape in values.items():
        assert tuple(node.meta["val"].shape) == shape, (
            f"{node.format_node()}: val is {node.meta['val'].shape}, not {shape}"
        )


def _interpreted_shapes(joint: JointGraph) -> list[tuple[fx.Node, tuple[int, ...]]]:
    seen: list[tuple[fx.Node, tuple[int, ...]]] = []

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function" and isinstance(result, torch.Tensor):
                assert result.dtype == n.meta["val"].dtype, n.format_node()
                seen.append((n, tuple(result.shape)))
            return result

    def example(value: torch.Tensor) -> torch.Tensor:
        return torch.ones(value.shape, dtype=value.dtype)

    Recorder(joint.module).run(*(example(node.meta["val"]) for node in joint.placeholders))
    return seen


def ops(joint: JointGraph) -> Counter[str]:
    """How often each op occurs, by its packet's name: "aten.add" is "add", `use`s left out."""
    names = (node.target for node in joint.graph.nodes if node.op == "call_function")
    counted = Counter(str(getattr(target, "overloadpacket", target)).rpartition(".")[2] for target in names)
    counted.pop("use", None)
    return counted


def text(joint: JointGraph) -> list[str]:
    """One line per op: `add(x0, 2) -> [8, 16]`; scalars and lists as they are, kwargs left out."""
    lines = []
    for node in joint.graph.nodes:
        if node.op == "call_function":
            name = str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]
            value = node.meta["val"]
            shape = list(value.shape) if isinstance(value, torch.Tensor) else "..."
            lines.append(f"{name}({', '.join(map(str, node.args))}) -> {shape}")
    return lines


PRELUDE = (NormalizeArguments(), NormalizeCreations(), RemoveNoops(), RemoveDeadCode())


def prepared(function: Function, *inputs: torch.Tensor, grads: bool = False) -> JointGraph:
    """The graph of `function` as most passes find it."""
    return run_passes(joint_of(function, *inputs, grads=grads), PRELUDE)


def applied(
    graph_pass: GraphPass, function: Function, *inputs: torch.Tensor, grads: bool = False
) -> JointGraph:
    """`graph_pass` on the prepared graph of `function`, checked: it stays valid and computes the same."""
    before = prepared(function, *inputs, grads=grads)
    after = copy_joint(run_passes(copy_joint(before), [graph_pass]))
    assert_valid(after)
    assert_same(before, after, inputs)
    return after


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct values of the given shape, small and not symmetric."""
    numbers = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(numbers * 0.7 + 0.3).reshape(shape).to(dtype)
