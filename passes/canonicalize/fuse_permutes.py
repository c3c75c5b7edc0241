from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.canonicalize.view_properties import ONE_RESHAPE, PERMUTES_FUSED
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph
from passes.ir.rewrite import erase_dead, ints_at, replace, tensor_at

__all__ = ["FusePermutes"]

aten = torch.ops.aten


@dataclass(frozen=True)
class FusePermutes(GraphPass):
    """Make a permute of a permute one permute, or none.

    %a: f32[16, 8] = aten.permute(%x, [1, 0])
    %b: f32[8, 16] = aten.permute(%a, [1, 0])
    ->
    %x itself
    """

    requires = (ONE_SPELLING, NO_USES)
    ensures = (PERMUTES_FUSED,)
    breaks = (NO_DUPLICATES, ONE_RESHAPE)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.target is aten.permute.default:
                _fuse(node)
        erase_dead(joint.graph)
        return joint


def _fuse(node: fx.Node) -> None:
    inner, order = tensor_at(node), ints_at(node, 1)
    if inner.target is aten.permute.default:
        first = ints_at(inner, 1)
        order = [first[d] for d in order]
        inner = tensor_at(inner)
        node.args = (inner, order)
    if order == sorted(order):
        replace(node, inner)
