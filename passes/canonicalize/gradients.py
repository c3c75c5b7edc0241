"""What autograd leaves, in ops that split better: padded sums, scatters of one element, expanded constants."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import Argument, map_arg

from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING
from passes.canonicalize.random_to_uniform import PLAIN_CREATIONS
from passes.ir.graph_pass import (
    GraphPass,
    OpPass,
    call_like,
    emit,
    erase_dead,
    int_at,
    ints_at,
    replace,
    shape_of,
    tensor_at,
)
from passes.ir.graph_properties import NO_USES, of_ops
from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_pointwise, is_zeros

aten = torch.ops.aten


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
                _put_together(node)
        erase_dead(joint.graph)
        return joint


@dataclass(frozen=True)
class _Piece:
    """`value` at [low, high) of `dim`, zeros elsewhere."""

    value: fx.Node
    dim: int
    low: int
    high: int


def _put_together(node: fx.Node) -> None:
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


_SCATTERS = (aten.scatter.value, aten.scatter.src, aten.scatter_add.default)


SCATTERS_WRITTEN = of_ops(
    "no scatter sets one element per row",
    lambda node: "is one" if node.target in _SCATTERS and _one_per_row(node) else None,
)


class ScatterToWhere(OpPass):
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

    def rewrite(self, node: fx.Node) -> None:
        if node.target in _SCATTERS and _one_per_row(node):
            replace(node, _compared(node))


def _one_per_row(node: fx.Node) -> bool:
    if len(node.args) != 4 or node.kwargs:
        return False
    shape, wanted = list(shape_of(tensor_at(node, 2))), list(shape_of(tensor_at(node)))
    if not wanted:
        return False
    wanted[int_at(node, 1)] = 1
    value = node.args[3]
    return shape == wanted and (not isinstance(value, fx.Node) or list(shape_of(value)) == wanted)


def _compared(node: fx.Node) -> fx.Node:
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
    return sparse if is_zeros(base) else emit(node, aten.add.Tensor, base, sparse)


def _scalar(node: fx.Node, value: Any) -> fx.Node:
    like = node.meta["val"]
    return emit(node, aten.full.default, [], value, dtype=like.dtype, device=like.device)


class SinkExpands(OpPass):
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

    def rewrite(self, node: fx.Node) -> None:
        if is_pointwise(node):
            _sink(node)
        elif node.target is aten.reshape.default:
            _expand_again(node)


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


def _joined(node: fx.Node) -> str | None:
    if node.target is not aten.convolution_backward.default:
        return None
    mask = cast(Sequence[bool], node.args[-1])
    return "computes both" if mask[0] and (mask[1] or mask[2]) else None


GRADIENTS_APART = of_ops("a convolution's gradients of input and weight are ops of their own", _joined)


class SplitConvolutionBackward(OpPass):
    """Compute the gradient of a convolution's input apart from those of its weight and bias.

        %g: (x, w, b) = aten.convolution_backward(%dy, %x, %w, ..., [True, True, True])
        ->
        %g: (x, -, -) = aten.convolution_backward(%dy, %x, %w, ..., [True, False, False])
        %h: (-, w, b) = aten.convolution_backward(%dy, %x, %w, ..., [False, True, True])

    Kernels compute them apart in any case. As ops they may be split differently, and what the first leaves to be
    exchanged with neighbours, or to be summed, travels while the second runs.
    """

    ensures = (GRADIENTS_APART,)

    def rewrite(self, node: fx.Node) -> None:
        if _joined(node):
            _split(node)


def _split(node: fx.Node) -> None:
    *args, mask = node.args
    made: dict[bool, fx.Node] = {}
    for item in list(node.users):  # a gradient that nothing reads is not computed
        index = int_at(item, 1)
        if (own := index == 0) not in made:
            computed = [True, False, False] if own else [False, *mask[1:]]  # type: ignore[misc]
            made[own] = emit(node, aten.convolution_backward.default, *args, computed)
        replace(item, emit(item, operator.getitem, made[own], index))
    node.graph.erase_node(node)
