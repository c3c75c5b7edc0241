from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.canonicalize.normalize_creations import PLAIN_CREATIONS
from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph
from passes.ir.properties import of_ops
from passes.ir.rewrite import emit, erase_dead, int_at, replace, shape_of, tensor_at

__all__ = ["SCATTERS_WRITTEN", "ScatterToWhere"]

aten = torch.ops.aten

_SCATTERS = (aten.scatter.value, aten.scatter.src, aten.scatter_add.default)


SCATTERS_WRITTEN = of_ops(
    "no scatter sets one element per row",
    lambda node: "is one" if node.target in _SCATTERS and _one_per_row(node) else None,
)


@dataclass(frozen=True)
class ScatterToWhere(GraphPass):
    """Write a scatter of one element per row as a comparison with the row's positions.

        %s: f32[64, 96] = aten.scatter(%zeros, 1, %index, -1.0)      // %index: i64[64, 1]
        ->
        %r: i64[96]     = aten.arange(0, 96, 1)
        %e: b8[64, 96]  = aten.eq(%r, %index)
        %v: f32[]       = aten.full([], -1.0)
        %s: f32[64, 96] = aten.where(%e, %v, %zeros)

    The gradient of a gather, as in cross entropy over a vocabulary, is then pointwise: its
    vocabulary dim splits without knowing which rank holds the target.
    """

    requires = (ONE_SPELLING, PLAIN_CREATIONS)
    ensures = (SCATTERS_WRITTEN,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.target in _SCATTERS and _one_per_row(node):
                replace(node, _rewrite(node))
        erase_dead(joint.graph)
        return joint


def _one_per_row(node: fx.Node) -> bool:
    if len(node.args) != 4 or node.kwargs:
        return False
    shape, wanted = list(shape_of(tensor_at(node, 2))), list(shape_of(tensor_at(node)))
    if not wanted:
        return False
    wanted[int_at(node, 1)] = 1
    value = node.args[3]
    return shape == wanted and (not isinstance(value, fx.Node) or list(shape_of(value)) == wanted)


def _rewrite(node: fx.Node) -> fx.Node:
    base, index, value = tensor_at(node), tensor_at(node, 2), node.args[3]
    like, dim = node.meta["val"], int_at(node, 1)
    size, after = like.shape[dim], like.ndim - 1 - dim
    positions = emit(node, aten.arange.start_step, 0, size, 1, dtype=torch.int64, device=like.device)
    if after:
        positions = emit(node, aten.reshape.default, positions, [size, *([1] * after)])
    here = emit(node, aten.eq.Tensor, positions, index)
    added = value if isinstance(value, fx.Node) else _scalar(node, value)
    if node.target is not aten.scatter_add.default:
        return emit(node, aten.where.self, here, added, base)
    sparse = emit(node, aten.where.self, here, added, _scalar(node, 0))
    return sparse if _is_zero(base) else emit(node, aten.add.Tensor, base, sparse)


def _scalar(node: fx.Node, value: Any) -> fx.Node:
    like = node.meta["val"]
    return emit(node, aten.full.default, [], value, dtype=like.dtype, device=like.device)


def _is_zero(node: fx.Node) -> bool:
    return node.target is aten.full.default and bool(node.args[1] == 0)
