from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from passes.canonicalize.merge_duplicates import NO_DUPLICATES
from passes.ir.graph_pass import GraphPass
from passes.ir.graph_properties import NO_USES
from passes.ir.joint import JointGraph
from passes.ir.rewrite import emit, erase_dead, ints_at, replace, shape_of, tensor_at

__all__ = ["PadsToCat"]

aten = torch.ops.aten


@dataclass(frozen=True)
class PadsToCat(GraphPass):
    """Put pieces side by side instead of adding them up padded with zeros.

        %p: f32[8, 6] = aten.constant_pad_nd(%a, [0, 2])      // %a: f32[8, 4]
        %q: f32[8, 6] = aten.constant_pad_nd(%b, [4, 0])      // %b: f32[8, 2]
        %y: f32[8, 6] = aten.add(%p, %q)
        ->
        %y: f32[8, 6] = aten.cat([%a, %b], 1)

    The gradients of slices that together cover a tensor (rotary halves; query, key and value of one
    projection) come out of autograd as such sums.
    """

    requires = (NO_USES,)
    breaks = (NO_DUPLICATES,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        for node in reversed(list(joint.graph.nodes)):  # the largest sum first
            if node.target is aten.add.Tensor:
                _rewrite(node)
        erase_dead(joint.graph)
        return joint


@dataclass(frozen=True)
class _Piece:
    """`value` at [low, high) of `dim`, zeros elsewhere."""

    value: fx.Node
    dim: int
    low: int
    high: int


def _rewrite(node: fx.Node) -> None:
    pieces: list[_Piece] = []
    for leaf in _leaves(node, node):
        piece = _piece(leaf) if isinstance(leaf, fx.Node) else None
        if piece is None:
            return
        pieces.append(piece)
    dim = pieces[0].dim
    pieces.sort(key=lambda piece: piece.low)
    ends = [0, *(piece.high for piece in pieces)]
    covered = [piece.low for piece in pieces] == ends[:-1] and ends[-1] == shape_of(node)[dim]
    same_dtype = all(piece.value.meta["val"].dtype == node.meta["val"].dtype for piece in pieces)
    if covered and same_dtype and all(piece.dim == dim for piece in pieces):
        replace(node, emit(node, aten.cat.default, [piece.value for piece in pieces], dim))


def _leaves(node: Argument, root: fx.Node) -> Iterator[Argument]:
    """The terms of a sum: looks through adds of the sum's shape that only the sum reads."""
    if not isinstance(node, fx.Node) or shape_of(node) != shape_of(root):
        yield None
    elif node.target is aten.add.Tensor and not node.kwargs and (node is root or len(node.users) == 1):
        yield from _leaves(node.args[0], root)
        yield from _leaves(node.args[1], root)
    else:
        yield node


def _piece(node: fx.Node) -> _Piece | None:
    if node.target is not aten.constant_pad_nd.default or (len(node.args) > 2 and node.args[2] != 0):
        return None
    value, pads = tensor_at(node), ints_at(node, 1)
    padded = [i for i, pad in enumerate(pads) if pad]
    if not padded or min(pads) < 0 or len({i // 2 for i in padded}) > 1:
        return None
    dim = len(shape_of(node)) - 1 - padded[0] // 2
    low = pads[padded[0] // 2 * 2]
    return _Piece(value, dim, low, low + shape_of(value)[dim])
