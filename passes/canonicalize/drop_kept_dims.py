from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph
from passes.ir.rewrite import call_like, erase_dead, ints_at, replace, shape_of, tensor_at

__all__ = ["DropKeptDims"]

aten = torch.ops.aten

_REDUCTIONS = (aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.any.dims, aten.all.dims)


@dataclass(frozen=True)
class DropKeptDims(GraphPass):
    """Let a reduction drop its dims where a reshape would drop them right after.

    %s: f32[1, 1, 16] = aten.sum(%x, [0, 1], True)        // %x: f32[4, 8, 16]
    %g: f32[16]       = aten.reshape(%s, [16])
    ->
    %g: f32[16]       = aten.sum(%x, [0, 1], False)
    """

    requires = (ONE_SPELLING,)
    breaks = (NO_DUPLICATES,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.target is aten.reshape.default and _drops_kept(node):
                reduction = tensor_at(node)
                x, dims = reduction.args[:2]
                replace(node, call_like(reduction, x, dims, False, **reduction.kwargs))
        erase_dead(joint.graph)
        return joint


def _drops_kept(node: fx.Node) -> bool:
    reduction = tensor_at(node)
    if reduction.target not in _REDUCTIONS or len(reduction.users) > 1:
        return False
    dims = ints_at(reduction, 1)
    left = [size for d, size in enumerate(shape_of(tensor_at(reduction))) if d not in dims]
    return bool(reduction.args[2]) and left == list(shape_of(node))
