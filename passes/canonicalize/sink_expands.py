from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.canonicalize.normalize_arguments import ONE_SPELLING
from passes.canonicalize.normalize_creations import PLAIN_CREATIONS
from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_pointwise
from passes.ir.rewrite import call_like, emit, erase_dead, replace, shape_of, tensor_at

__all__ = ["SinkExpands"]

aten = torch.ops.aten


@dataclass(frozen=True)
class SinkExpands(GraphPass):
    """Let pointwise ops broadcast by themselves; expand what they compute, if that is still needed.

        %e: f32[8, 16] = aten.expand(%x, [8, 16])        // %x: f32[8, 1]
        %d: f32[8, 16] = aten.div(%e, 16)
        %y: f32[8, 16] = aten.mul(%d, %z)                // %z: f32[8, 16]
        ->
        %d: f32[8, 1]  = aten.div(%x, 16)
        %y: f32[8, 16] = aten.mul(%d, %z)

    A constant with dims (`full`) counts as an expanded number. The gradients of means and norms come
    expanded out of autograd; unexpanded they are smaller to compute, to save and to send.
    """

    requires = (ONE_SPELLING, PLAIN_CREATIONS)
    breaks = (NO_DUPLICATES,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in list(joint.graph.nodes):
            if is_pointwise(node):
                _sink(node)
            elif node.target is aten.reshape.default:
                _expand_again(node)
        erase_dead(joint.graph)
        return joint


def _sink(node: fx.Node) -> None:
    small = {operand: _unexpanded(operand) for operand in node.all_input_nodes}
    if all(source is operand for operand, source in small.items()):
        return
    args, kwargs = map_arg((node.args, dict(node.kwargs)), small.__getitem__)
    new = call_like(node, *args, **kwargs)
    if new.meta["val"].dtype != node.meta["val"].dtype:  # numbers promote less than tensors
        node.graph.erase_node(new)
    elif shape_of(new) == shape_of(node):
        replace(node, new)
    else:
        replace(node, emit(node, aten.expand.default, new, list(shape_of(node))))


def _expand_again(node: fx.Node) -> None:
    """A reshape of one number, expanded, is that number expanded to the new shape."""
    operand = tensor_at(node)
    source, shape = _unexpanded(operand), list(shape_of(node))
    one = source.meta["val"].numel() == 1 and len(shape_of(source)) <= len(shape)
    if source is not operand and one:
        replace(node, emit(node, aten.expand.default, source, shape))


def _unexpanded(operand: fx.Node) -> fx.Node:
    if operand.target is aten.expand.default:
        return tensor_at(operand)
    if operand.target is aten.full.default and operand.args[0]:
        kwargs: dict[str, Any] = dict(operand.kwargs)
        return emit(operand, aten.full.default, [], operand.args[1], **kwargs)
    return operand
