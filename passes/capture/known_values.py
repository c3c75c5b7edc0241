"""The values of a traced graph that follow from a call's own tensors, what such values are if all are finite, and which
are computed alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from passes.ir.joint import CPU, ancestors, map_operands, node_value, tensor_operands
from passes.ir.op_traits import draws, is_product
from passes.ir.torch_tracing import AotGraph, tracing_suspended

__all__ = ["Known", "known_values", "twins"]

aten = torch.ops.aten
_TESTS = (aten.isinf.default, aten.isnan.default)
_SAME: dict[Any, bool] = {aten.eq.Tensor: True, aten.ne.Tensor: False}
_OTHER: dict[Any, bool] = {aten.eq.Scalar: False, aten.ne.Scalar: True}


@dataclass(frozen=True)
class Known:
    """value: None: not known. is_plain: whether it is made of the call's inputs, of parameters and buffers without a
    product, so that it is known wherever those have values. is_finite: it is known as long as numbers are finite."""

    value: Tensor | None = None
    is_plain: bool = False
    is_finite: bool = False


def known_values(aot: AotGraph, given: Sequence[Tensor], count: int) -> list[Known]:
    """Of the first outputs of a graph. given: the tensors of its inputs, by index."""
    real = _real_leaves(aot, given)
    with tracing_suspended(), torch.no_grad():
        return [_known(node, real) for node in _outputs(aot, count)]


def twins(aot: AotGraph, count: int) -> list[int]:
    """For each of the first outputs of a graph the first one that is computed alike: itself, or one before it."""
    nodes = _outputs(aot, count)
    needed = ancestors(nodes)
    numbers: dict[fx.Node, str] = {}
    table: dict[tuple[Any, str], str] = {}
    for node in aot.module.graph.nodes:
        if node in needed:
            arguments = repr(fx.map_arg((node.args, node.kwargs), lambda operand: numbers[operand]))
            alone = node.op != "call_function" or draws(node)
            numbers[node] = table.setdefault((node if alone else node.target, arguments), f"%{len(table)}")
    found = [numbers[node] for node in nodes]
    return [found.index(number) for number in found]


def _outputs(aot: AotGraph, count: int) -> list[fx.Node]:
    results = pytree.tree_leaves(aot.module.graph.output_node().args[0], is_leaf=lambda leaf: leaf is None)
    ends = zip(aot.outputs, results, strict=True)
    return [node for end, node in ends if end.kind == "output" and end.index < count]


def _real_leaves(aot: AotGraph, given: Sequence[Tensor]) -> dict[fx.Node, Tensor | None]:
    """Placeholder or constant -> its value; None where a tensor has none here. Tangents are missing."""
    found: dict[fx.Node, Tensor | None] = {}
    for node, end in zip(aot.module.graph.find_nodes(op="placeholder"), aot.inputs, strict=True):
        if end.kind == "input":
            found[node] = _here(given[end.index])
    for node in aot.module.graph.find_nodes(op="get_attr"):
        held = getattr(aot.module, str(node.target))
        found[node] = _here(held) if isinstance(held, Tensor) else None
    return found


def _here(tensor: Tensor) -> Tensor | None:
    """Shards are parts of a value."""
    if tensor.is_meta or type(tensor).__name__ == "DTensor":
        return None
    return tensor.detach().to(CPU)


def _known(result: fx.Node, real: dict[fx.Node, Tensor | None]) -> Known:
    needed = ancestors([result])
    ordered = [node for node in result.graph.nodes if node in needed]
    ops = [node for node in ordered if node.op == "call_function"]
    if not any(is_product(op) or draws(op) for op in ops):
        leaves = [real.get(node) for node in ordered if node.op != "call_function"]
        if any(leaf is None for leaf in leaves):
            return Known(is_plain=True)
        return Known(_computed(result, ordered, dict(real)), is_plain=True)
    finite = _if_finite(result, ordered)
    return Known(finite, is_finite=finite is not None)


def _computed(result: fx.Node, ordered: Sequence[fx.Node], values: dict[fx.Node, Any]) -> Any:
    for node in ordered:
        if node not in values:
            args, kwargs = map_operands(node, [values[operand] for operand in tensor_operands(node)])
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[result]


def _if_finite(result: fx.Node, ordered: Sequence[fx.Node]) -> Tensor | None:
    """A truth about tests of numbers for being finite; None if it is about anything else."""
    tests: dict[fx.Node, Any] = {}
    seen, waiting = set[fx.Node](), [result]
    while waiting:
        node = waiting.pop()
        seen.add(node)
        passed = _passes_test(node)
        if passed is not None:
            tests[node] = torch.tensor(passed).expand(node_value(node).shape)
        elif node.op != "call_function" or node_value(node).dtype != torch.bool:
            return None
        else:
            waiting += tensor_operands(node)
    return _computed(result, [node for node in ordered if node in seen], tests)


def _passes_test(node: fx.Node) -> bool | None:
    """What a test of each number for being finite says of finite ones: `isinf`, `x != x`, `abs(x) == inf`."""
    if node.target in _TESTS:
        return False
    if node.target in _SAME and node.args[0] is node.args[1]:
        return _SAME[node.target]
    number = node.args[1] if node.target in _OTHER else None
    if isinstance(number, float) and math.isinf(number):
        return _OTHER[node.target]
    return None
