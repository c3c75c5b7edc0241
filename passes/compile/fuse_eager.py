"""What a compiler would do without being asked, for graphs that run op by op."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import fx

import passes.ops.layer_ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::contract)
from passes.compile.join_linears import Pattern, matches, op, stand_in
from passes.ir.graph_pass import RankPass
from passes.ir.graph_properties import COLLECTIVES, FUNCTIONAL
from passes.ir.joint import node_value, result_index
from passes.ops.collective_ops import ALL_REDUCE_IN_PLACE, NAMED_BY_NAME

aten = torch.ops.aten


c10d = torch.ops._c10d_functional

_IN_PLACE: dict[Any, Any] = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    NAMED_BY_NAME["all_reduce"]: ALL_REDUCE_IN_PLACE,
}

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""Of a contiguous value: the same memory in another shape."""

_BIAS = Pattern()
_PRODUCT = op(aten.mm.default)(Pattern(), Pattern())
_VALUE = op(aten.view.default)(_PRODUCT, Pattern()) | _PRODUCT
_WITH_BIAS = op(aten.add.Tensor)(_VALUE, _BIAS)

_OWNING = frozenset(
    {
        aten.add.Tensor,
        aten.addmm.default,
        aten.bmm.default,
        aten.cat.default,
        aten.convolution_backward.default,
        aten.embedding_dense_backward.default,
        aten.mm.default,
        aten.mul.Tensor,
        aten.native_layer_norm_backward.default,
        aten.sum.dim_IntList,
        torch.ops.autoshard.contract.default,
        c10d.wait_tensor.default,
    }
)
"""Ops whose results share no memory with their operands; a collective's is known by its wait."""


class FuseEager(RankPass):
    """Drop views that change nothing, add biases in the product, pad in the copy, reduce fresh buffers in place.

        %p: f32[32, 64]   = mm(%x, %w)
        %v: f32[8, 4, 64] = view(%p, [8, 4, 64])          %p: f32[32, 64]   = addmm(%b, %x, %w)
        %y: f32[8, 4, 64] = add(%v, %b)             ->    %y: f32[8, 4, 64] = view(%p, [8, 4, 64])
        %c: f32[96]       = cat(%g, %h)                   %c: f32[96]       = cat(%g, %h)
        %r: f32[96]       = all_reduce(%c)                %r: f32[96]       = all_reduce_(%c)
        %e: f32[13, 8]    = cat(%own, %halo)              %z: f32[1, 8]     = new_full(%own, [1, 8], 0)
        %d: f32[14, 8]    = constant_pad_nd(%e)           %d: f32[14, 8]    = cat(%z, %own, %halo)

    In place. Run last, on ATen ops: afterwards the graph is functional no more. In place is legal where the
    operand is a result that owns its memory, and nothing else reads it.

    The same results; sums of a product and its bias are rounded once instead of twice.
    """

    requires = (FUNCTIONAL,)
    breaks = (FUNCTIONAL,)
    keeps = (COLLECTIVES,)

    def rewrite(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if _changes_nothing(node):
                stand_in(node, node.args[0])  # type: ignore[arg-type]
                graph.erase_node(node)
        for node in list(graph.nodes):
            if node.target is aten.add.Tensor:
                _add_in_product(graph, node)
            elif node.target is aten.constant_pad_nd.default and _is_fresh(node.args[0]):
                _pad_in_cat(graph, node)
            elif reduced_in_place(node):
                node.target = _IN_PLACE[node.target]
        graph.lint()


def _changes_nothing(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.args[0] if node.args else None, fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if node.target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        return before.shape == after.shape
    return node.target is aten.permute.default and list(node.args[1]) == list(range(before.ndim))  # type: ignore[arg-type]


def reduced_in_place(node: fx.Node) -> bool:
    """Whether the collective `node` will leave its result where its operand is."""
    return node.target in _IN_PLACE and _owns_its_memory(node.args[0])


def _owns_its_memory(node: object) -> bool:
    """A result of its own, looked at through views, which nothing else reads."""
    while isinstance(node, fx.Node) and len(node.users) == 1 and node.target in VIEWS:
        node = node.args[0]
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    producer, _ = result_index(node)
    return producer.target in _OWNING and node_value(node).is_contiguous()


def _is_fresh(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.cat.default and len(node.users) == 1


def _add_in_product(graph: fx.Graph, add: fx.Node) -> None:
    """add(view(mm(a, b)), bias) -> view(addmm(bias, a, b)), where nothing else reads the product."""
    for bound in matches(_WITH_BIAS, add, {}):
        product, value, bias = (bound[pattern] for pattern in (_PRODUCT, _VALUE, _BIAS))
        if not isinstance(bias, fx.Node) or not _takes_bias(product, value, add, bias):
            continue
        with graph.inserting_before(add):
            result = graph.call_function(aten.addmm.default, (bias, *product.args))
            result.meta = dict(product.meta)
            if value is not product:
                result = graph.call_function(aten.view.default, (result, value.args[1]))
                result.meta = dict(add.meta)
        add.replace_all_uses_with(result)
        for dead in dict.fromkeys((add, value, product)):
            graph.erase_node(dead)
        return


def _pad_in_cat(graph: fx.Graph, pad: fx.Node) -> None:
    """constant_pad_nd(cat(xs)) -> cat(fill, xs, fill), where one dim is padded, the one along which cat joins."""
    joined, flat, *fill = cast(tuple[Any, ...], pad.args)
    parts, *rest = cast(tuple[Any, ...], joined.args)
    shape = list(joined.meta["val"].shape)
    dim = (rest[0] if rest else 0) % len(shape)
    sides = [*flat, *[0] * (2 * len(shape) - len(flat))]  # of the last dim first
    at = 2 * (len(shape) - 1 - dim)
    before, after = sides[at : at + 2]
    if min(before, after) < 0 or any(n for i, n in enumerate(sides) if i not in (at, at + 1)):
        return
    parts = list(parts)
    with graph.inserting_before(pad):
        for place, rows in ((0, before), (len(parts) + 1, after)):
            if rows:
                size = [*shape[:dim], rows, *shape[dim + 1 :]]
                end = graph.call_function(aten.new_full.default, (parts[-1], size, *(fill or [0])))
                end.meta = {**pad.meta, "val": pad.meta["val"].new_empty(size)}
                parts.insert(place, end)
        padded = graph.call_function(aten.cat.default, (parts, dim))
    padded.meta = dict(pad.meta)
    pad.replace_all_uses_with(padded)
    graph.erase_node(pad)
    graph.erase_node(joined)


def _takes_bias(product: fx.Node, value: fx.Node, add: fx.Node, bias: fx.Node) -> bool:
    if len(product.users) != 1 or len(value.users) != 1:
        return False
    p, v, b, result = (n.meta["val"] for n in (product, value, bias, add))
    whole = v.shape == result.shape and v.shape[-1] == p.shape[-1] and math.prod(v.shape[:-1]) == p.shape[0]
    return whole and b.shape == p.shape[1:] and p.dtype == b.dtype == result.dtype


_NAMED_ALIKE = (
    "add.Tensor addmm.default cat.default clone.default convolution.default div.Tensor "
    "embedding.default exp.default gather.default log.default matmul.default mm.default mul.Tensor "
    "native_layer_norm.default neg.default permute.default relu.default reshape.default rsqrt.default "
    "select.int sub.Tensor sum.dim_IntList where.self"
)
_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    getattr(getattr(aten, name), overload): getattr(torch, name)
    for name, overload in (one.split(".") for one in _NAMED_ALIKE.split())
} | {aten.view.default: torch.Tensor.view}
"""Overloads, and functions that run them for the same arguments in the same places."""


def call_directly(module: fx.GraphModule) -> fx.GraphModule:
    """`module`, in place, with overloads exchanged for torch's functions; the same kernels run.

    For a program that is about to run: passes know ops by their overloads.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
    module.recompile()
    return module
