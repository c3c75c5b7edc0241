"""Ops that need not run: copies, identities, dims that are kept and dropped again, dead code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.canonicalize.normalize_arguments import NO_DUPLICATES, ONE_SPELLING, REDUCTIONS
from passes.canonicalize.permutes import ONE_RESHAPE, PERMUTES_ABSORBED, PERMUTES_FUSED
from passes.ir.graph_pass import (
    GraphPass,
    OpPass,
    call_like,
    erase_dead,
    ints_at,
    replace,
    shape_of,
    tensor_at,
)
from passes.ir.graph_properties import NO_DEAD_CODE, of_ops
from passes.ir.joint import JointGraph, tensor_operands, tensors_of

aten = torch.ops.aten

WRITTEN: dict[Any, Any] = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def _noted(node: fx.Node) -> str | None:
    is_noted = node.target in WRITTEN or any(v.is_conj() or v.is_neg() for v in tensors_of(node))
    return "a conjugate that is only noted" if is_noted else None


CONJUGATES_WRITTEN = of_ops("conjugates are written out", _noted)


class WriteConjugates(OpPass):
    """Compute conjugates and their negated imaginary parts, which torch only notes in a bit of the tensor.

        %c: c64[8, 5] = aten._conj(%x)
        ->
        %c: c64[8, 5] = aten.conj_physical(%x)

    A clone that takes the bit away is then a copy like any other, and a collective moves what it should: it
    sends memory and knows nothing of the bit. The conjugate of a Python number, in the gradient of `w * 2j`, is one.
    """

    ensures = (CONJUGATES_WRITTEN,)

    def rewrite(self, node: fx.Node) -> None:
        node.target = WRITTEN.get(node.target, node.target)
        if node.target is aten.conj_physical.default and isinstance(node.args[0], complex):
            _replace(node, node.args[0].conjugate())
        else:
            _clear(node)


def _replace(node: fx.Node, number: complex) -> None:
    for user in list(node.users):
        swapped = fx.map_arg((user.args, user.kwargs), lambda operand: number if operand is node else operand)
        user.args, user.kwargs = swapped  # type: ignore[misc]
    node.graph.erase_node(node)


def _clear(node: fx.Node) -> None:
    """Views of a conjugate have its bit too."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
        node.meta["val"] = value.resolve_conj().resolve_neg()
    elif isinstance(value, (tuple, list)):
        parts = [v.resolve_conj().resolve_neg() if isinstance(v, torch.Tensor) else v for v in value]
        node.meta["val"] = type(value)(parts)


class RemoveNoops(OpPass):
    """Drop ops that return their operand: the graph is functional, so a copy and the thing are one.

        %d: f32[8] = aten.detach(%x)
        %c: f32[8] = aten.clone(%d)
        %m: f32[8] = aten.mul(%c, 1.0)
        %y: f32[8] = aten.relu(%m)
        ->
        %y: f32[8] = aten.relu(%x)

    Kept: a `clone` that the graph returns of an input or of another returned value, where the caller
    could tell the two apart by writing into one.
    """

    requires = (CONJUGATES_WRITTEN, ONE_SPELLING)
    breaks = (NO_DEAD_CODE, NO_DUPLICATES, PERMUTES_FUSED, PERMUTES_ABSORBED, ONE_RESHAPE)

    def rewrite(self, node: fx.Node) -> None:
        find = _TABLE.get(node.target)
        same = find(node) if find is not None else None
        if same is not None and not _caller_sees_copy(node, same):
            replace(node, same)


def _caller_sees_copy(node: fx.Node, same: fx.Node) -> bool:
    def returned(x: fx.Node) -> bool:
        return any(user.op == "output" for user in x.users)

    shared = same.op == "placeholder" or returned(same)
    return node.target is aten.clone.default and returned(node) and shared


def _alike(node: fx.Node, operand: Any) -> fx.Node | None:
    """`operand` if it has `node`'s shape, dtype and device."""
    if not isinstance(operand, fx.Node):
        return None
    a, b = node.meta["val"], operand.meta["val"]
    same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    return operand if same else None


def _first(node: fx.Node) -> fx.Node | None:
    return _alike(node, node.args[0])


def _if_scalar(neutral: float) -> Callable[[fx.Node], fx.Node | None]:
    def find(node: fx.Node) -> fx.Node | None:
        scalar = node.args[1]
        return _first(node) if isinstance(scalar, (int, float)) and scalar == neutral else None

    return find


def _identity_order(node: fx.Node) -> fx.Node | None:
    order = ints_at(node, 1)
    return _first(node) if order == sorted(order) else None


def _full_slice(node: fx.Node) -> fx.Node | None:
    step = node.args[4] if len(node.args) > 4 else 1
    return _first(node) if step == 1 else None


def _all_zero(node: fx.Node) -> fx.Node | None:
    """The amounts to pad or roll by."""
    return _first(node) if not any(ints_at(node, 1)) else None


def _cat(node: fx.Node) -> fx.Node | None:
    """Drops empty pieces (Hugging Face caches start as one); a single piece is the result itself."""
    pieces = tensor_operands(node)
    full = [piece for piece in pieces if piece.meta["val"].numel()]
    if len(full) < len(pieces) and full and all(p.meta["val"].dtype == node.meta["val"].dtype for p in full):
        node.args = (full, *node.args[1:])
        pieces = full
    return _alike(node, pieces[0]) if len(pieces) == 1 else None


ALIASES = tuple(
    getattr(aten, name).default
    for name in ("alias", "detach", "lift", "lift_fresh", "lift_fresh_copy", "clone")
)

_TABLE: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    **dict.fromkeys(ALIASES, _first),
    aten._to_copy.default: _first,
    aten.expand.default: _first,
    aten.reshape.default: _first,
    aten.slice.Tensor: _full_slice,
    aten.permute.default: _identity_order,
    aten.constant_pad_nd.default: _all_zero,
    aten.roll.default: _all_zero,
    aten.add.Tensor: _if_scalar(0),
    aten.add.Scalar: _if_scalar(0),
    aten.sub.Tensor: _if_scalar(0),
    aten.sub.Scalar: _if_scalar(0),
    aten.mul.Tensor: _if_scalar(1),
    aten.mul.Scalar: _if_scalar(1),
    aten.div.Tensor: _if_scalar(1),
    aten.div.Scalar: _if_scalar(1),
    aten.pow.Tensor_Scalar: _if_scalar(1),
    aten.cat.default: _cat,
    aten.where.self: lambda node: _alike(node, node.args[1]) if node.args[1] is node.args[2] else None,
}


class DropKeptDims(OpPass):
    """Let a reduction drop its dims where a reshape would drop them right after.

    %s: f32[1, 1, 16] = aten.sum(%x, [0, 1], True)        // %x: f32[4, 8, 16]
    %g: f32[16]       = aten.reshape(%s, [16])
    ->
    %g: f32[16]       = aten.sum(%x, [0, 1], False)
    """

    requires = (ONE_SPELLING,)
    breaks = (NO_DUPLICATES,)

    def rewrite(self, node: fx.Node) -> None:
        if node.target is aten.reshape.default and _drops_kept(node):
            reduction = tensor_at(node)
            x, dims = reduction.args[:2]
            replace(node, call_like(reduction, x, dims, False, **reduction.kwargs))


def _drops_kept(node: fx.Node) -> bool:
    reduction = tensor_at(node)
    if reduction.target not in REDUCTIONS or len(reduction.users) > 1:
        return False
    dims = ints_at(reduction, 1)
    left = [size for d, size in enumerate(shape_of(tensor_at(reduction))) if d not in dims]
    return bool(reduction.args[2]) and left == list(shape_of(node))


class RemoveDeadCode(GraphPass):
    """Erase ops whose results nothing reads. Placeholders stay: they are the calling convention.

    %unused: f32[8] = aten.relu(%x)
    ->
    (nothing)
    """

    ensures = (NO_DEAD_CODE,)

    def __call__(self, joint: JointGraph) -> JointGraph:
        erase_dead(joint.graph)
        return joint
