from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.base import GraphPass
from passes.joint import JointGraph
from passes.rewrite import erase_dead, replace

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

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.target is aten.permute.default:
                _fuse(node)
        erase_dead(joint.graph)
        return joint


def _fuse(node: fx.Node) -> None:
    inner: fx.Node = node.args[0]  # type: ignore[assignment]
    order: list[int] = list(node.args[1])  # type: ignore[arg-type]
    if inner.target is aten.permute.default:
        order = [inner.args[1][d] for d in order]  # type: ignore[index, misc]
        inner = inner.args[0]  # type: ignore[assignment]
        node.args = (inner, order)
    if order == sorted(order):
        replace(node, inner)
