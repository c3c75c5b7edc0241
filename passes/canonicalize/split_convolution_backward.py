from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph
from passes.ir.properties import of_ops
from passes.ir.rewrite import emit, int_at, replace

__all__ = ["GRADIENTS_APART", "SplitConvolutionBackward"]

aten = torch.ops.aten


def _joined(node: fx.Node) -> str | None:
    if node.target is not aten.convolution_backward.default:
        return None
    return "computes both" if _has_both(node.args[-1]) else None  # type: ignore[arg-type]


GRADIENTS_APART = of_ops("a convolution's gradients of input and weight are ops of their own", _joined)


@dataclass(frozen=True)
class SplitConvolutionBackward(GraphPass):
    """Compute the gradient of a convolution's input apart from those of its weight and bias.

        %g: (x, w, b) = aten.convolution_backward(%dy, %x, %w, ..., [True, True, True])
        ->
        %g: (x, -, -) = aten.convolution_backward(%dy, %x, %w, ..., [True, False, False])
        %h: (-, w, b) = aten.convolution_backward(%dy, %x, %w, ..., [False, True, True])

    Kernels compute them apart in any case. As ops they may be split differently, and what the first leaves to be
    exchanged with neighbours, or to be summed, travels while the second runs.
    """

    ensures = (GRADIENTS_APART,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if node.target is aten.convolution_backward.default and _has_both(node.args[-1]):  # type: ignore[arg-type]
                _split(node)
        return joint


def _has_both(mask: Sequence[bool]) -> bool:
    return mask[0] and (mask[1] or mask[2])


def _split(node: fx.Node) -> None:
    *args, mask = node.args
    first = emit(node, aten.convolution_backward.default, *args, [True, False, False])
    rest = emit(node, aten.convolution_backward.default, *args, [False, *mask[1:]])  # type: ignore[misc]
    for item in list(node.users):
        index = int_at(item, 1)
        replace(item, emit(item, operator.getitem, first if index == 0 else rest, index))
    node.graph.erase_node(node)
