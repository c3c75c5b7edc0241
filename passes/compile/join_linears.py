"""Products of flattened tensors as one op each, views and all: for an interpreter a view costs as much as an op."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.compile.matching import called, drop_unread, shape_of, sole_user, stand_in
from passes.ir.graph_pass import RankPass
from passes.ir.rank_properties import COLLECTIVES

__all__ = ["JoinLinears"]

aten = torch.ops.aten


@dataclass(frozen=True)
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

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        products = [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
        joined = [_join(node, graph) for node in products]
        if any(joined):
            drop_unread(graph)
        module.recompile()
        return module


def _join(product: fx.Node, graph: fx.Graph) -> bool:
    """Whether another op took its place."""
    bias, rows, matrix = (None, *product.args) if product.target is aten.mm.default else product.args
    if product.kwargs:
        return False
    turned, order = called(matrix, aten.permute.default)
    transposed = turned is not None and list(order) == [1, 0]
    result, operand = _unflattened(product, rows)
    if result is product and not transposed:
        return False
    if not operand.meta["val"].is_contiguous() or not (transposed or bias is None):
        return False
    with graph.inserting_before(result):
        if transposed:
            given = (operand, turned) if bias is None else (operand, turned, bias)
            joined = graph.call_function(aten.linear.default, given)
        else:
            joined = graph.call_function(aten.matmul.default, (operand, matrix))
    joined.meta = dict(result.meta)
    stand_in(result, joined)
    return True


def _unflattened(product: fx.Node, rows: Any) -> tuple[fx.Node, Any]:
    """(view of the product, what the rows were before they were flattened), or both as they are."""
    view = sole_user(product, aten.view.default)
    (operand, _) = called(rows, aten.view.default)
    shape, before = shape_of(view), shape_of(operand)
    if view is None or shape is None or before is None or shape[:-1] != before[:-1]:
        return product, rows
    flat = [math.prod(before[:-1]), before[-1]] == shape_of(rows) and shape_of(product) == [
        math.prod(shape[:-1]),
        shape[-1],
    ]
    return (view, operand) if flat else (product, rows)
