"""Ops that follow one another found in a graph; products and convolutions with their biases joined again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.graph_pass import RankPass
from passes.ir.graph_properties import COLLECTIVES
from passes.ir.joint import FakeCalls
from passes.ir.op_traits import is_cast, is_collective, op_kind
from passes.ir.torch_compat import fake_mode_of

aten = torch.ops.aten
_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


@dataclass(frozen=True, eq=False)
class Pattern:
    """An op with its arguments: patterns, lists of them, or what must stand there. The same pattern, met twice, is the
    same node, or an equal number. A creation or a cast may say more by name.

    target: None: anything. other: what may be there instead; the one here is tried first.
    """

    target: Any = None
    args: tuple[Any, ...] = ()
    other: Pattern | None = None

    def __or__(self, other: Pattern) -> Pattern:
        return Pattern(self.target, self.args, other)


Bound = Mapping[Pattern, Any]
"""What was found for each pattern."""


def op(target: Any) -> Callable[..., Pattern]:
    """`target`, to be written as a call."""
    return lambda *args: Pattern(target, args)


def matches(pattern: Any, value: Any, bound: Bound) -> Iterator[Bound]:
    """Every way in which `value` is the pattern, beside what is `bound` already."""
    if isinstance(pattern, (list, tuple)):
        if isinstance(value, (list, tuple)):
            yield from _all(pattern, value, bound)
    elif not isinstance(pattern, Pattern) or pattern in bound:
        same = bound[pattern] if isinstance(pattern, Pattern) else pattern
        if value == same:  # nodes equal themselves alone
            yield bound
    else:
        for found in _called(pattern, value, bound):
            yield {**found, pattern: value}
        if pattern.other is not None:
            for found in matches(pattern.other, value, bound):
                yield {**found, pattern: value}


def _called(pattern: Pattern, value: Any, bound: Bound) -> Iterator[Bound]:
    if pattern.target is None:
        yield bound
    elif isinstance(value, fx.Node) and value.target is pattern.target and _says_no_more(value):
        yield from _all(pattern.args, value.args, bound)
        if pattern.target in _COMMUTATIVE:
            yield from _all(pattern.args, value.args[::-1], bound)


def _says_no_more(node: fx.Node) -> bool:
    return not node.kwargs or is_cast(node) or op_kind(node) == "creation"


def _all(patterns: Sequence[Any], values: Sequence[Any], bound: Bound) -> Iterator[Bound]:
    if len(patterns) != len(values):
        return
    if not patterns:
        yield bound
        return
    for found in matches(patterns[0], values[0], bound):
        yield from _all(patterns[1:], values[1:], found)


def is_read_elsewhere(patterns: Sequence[Pattern], *bounds: Bound) -> bool:
    """Whether an op that is none of those found reads what was found for one of `patterns`."""
    inside = {node for bound in bounds for node in bound.values() if isinstance(node, fx.Node)}
    inner = {bound[pattern] for bound in bounds for pattern in patterns if pattern in bound}
    return any(user not in inside for node in inner for user in node.users)


def shape_of(node: object) -> list[int] | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def stand_in(node: fx.Node, other: fx.Node) -> None:
    """`other` is read in the place of `node`; it runs unread if that did."""
    node.replace_all_uses_with(other)
    if node.meta.pop("timed", False):
        other.meta["timed"] = True


def drop_unread(graph: fx.Graph) -> None:
    """Erase what nothing reads any more. Not collectives: other ranks wait in them. Nor what has the meta "timed"."""
    graph.eliminate_dead_code(
        lambda node: node.op != "call_function" or is_collective(node) or "timed" in node.meta
    )


class OpWriter:
    """Writes ops into a graph, each with its value."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._calls = FakeCalls()

    def __call__(self, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """`target(*args)` where nodes are being inserted, for the same line of the model as `like`."""
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: like.meta[key] for key in ("phase", "module", "source") if key in like.meta}
        node.meta["val"] = self._calls(target, args, kwargs, fake_mode_of(like.meta["val"]))
        return node


class JoinLinears(RankPass):
    """A product with a matrix, between views, becomes `linear` or `matmul`, which look at their operands the same way.

        %v: f32[32, 16]   = view(%x, [32, 16])
        %t: f32[16, 64]   = permute(%w, [1, 0])
        %p: f32[32, 64]   = addmm(%b, %v, %t)
        %y: f32[8, 4, 64] = view(%p, [8, 4, 64])      ->      %y: f32[8, 4, 64] = linear(%x, %w, %b)

    On ATen ops, after biases have joined their products. The same kernel runs on the same operands: of tensors that
    are not contiguous torch would make other products.
    """

    keeps = (COLLECTIVES,)

    def rewrite(self, graph: fx.Graph) -> None:
        products = [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
        joined = [_join(node, graph) for node in products]
        if any(joined):
            drop_unread(graph)


def _join(product: fx.Node, graph: fx.Graph) -> bool:
    """Whether another op took its place."""
    operands: tuple[Any, ...] = product.args
    bias, rows, matrix = (None, *operands) if product.target is aten.mm.default else operands
    if product.kwargs:
        return False
    transposed = matrix.target is aten.permute.default and matrix.args[1] == [1, 0]
    result, operand = _unflattened(product, rows)
    if result is product and not transposed:
        return False
    if not operand.meta["val"].is_contiguous() or not (transposed or bias is None):
        return False
    with graph.inserting_before(result):
        if transposed:
            given = () if bias is None else (bias,)
            joined = graph.call_function(aten.linear.default, (operand, matrix.args[0], *given))
        else:
            joined = graph.call_function(aten.matmul.default, (operand, matrix))
    joined.meta = dict(result.meta)
    stand_in(result, joined)
    return True


def _unflattened(product: fx.Node, rows: Any) -> tuple[fx.Node, Any]:
    """(view of the product, what the rows were before they were flattened), or both as they are."""
    view = next(iter(product.users), None)
    if view is None or len(product.users) > 1 or {view.target, rows.target} != {aten.view.default}:
        return product, rows
    shape, before = shape_of(view), shape_of(rows.args[0])
    assert shape is not None and before is not None
    flat = [math.prod(before[:-1])]
    last = shape_of(rows) == [*flat, *before[-1:]] and shape_of(product) == [*flat, *shape[-1:]]
    return (view, rows.args[0]) if last and shape[:-1] == before[:-1] else (product, rows)


_BACKWARD = torch.ops.aten.convolution_backward.default


class JoinConvolutions(RankPass):
    """Gradients of one convolution that are made from the same operands are made by one call.

        %a = convolution_backward(%g, %x, %w, ..., [True, False, False])
        %b = convolution_backward(%g, %x, %w, ..., [False, True, True])
        ->
        %a = convolution_backward(%g, %x, %w, ..., [True, True, True])

    They are apart for the search, which may split each in its own way: then their operands differ, and they stay.
    """

    keeps = (COLLECTIVES,)

    def rewrite(self, graph: fx.Graph) -> None:
        emit = OpWriter(graph)
        firsts: list[fx.Node] = []
        for node in list(graph.nodes):
            if node.target is not _BACKWARD or node.kwargs:
                continue
            first = next((n for n in firsts if n.args[:-1] == node.args[:-1]), None)
            if first is not None and not any(
                a and b for a, b in zip(_wanted(first), _wanted(node), strict=True)
            ):
                firsts.remove(first)
                node = _joined(first, node, graph, emit)
            firsts.append(node)
        drop_unread(graph)


def _wanted(node: fx.Node) -> list[bool]:
    return [bool(wanted) for wanted in node.args[-1]]  # type: ignore[union-attr]


def _joined(first: fx.Node, second: fx.Node, graph: fx.Graph, emit: OpWriter) -> fx.Node:
    wanted = [a or b for a, b in zip(_wanted(first), _wanted(second), strict=True)]
    with graph.inserting_before(first):
        made = emit(first, _BACKWARD, *first.args[:-1], wanted)
    first.replace_all_uses_with(made)
    second.replace_all_uses_with(made)
    return made
