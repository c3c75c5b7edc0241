"""Softmax and cross-entropy that were taken apart, in torch's own kernels again."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.compile.join_linears import OpWriter, called, drop_unread, others, shape_of, sole_user, summed
from passes.ir.graph_pass import RankPass
from passes.ir.rank_properties import COLLECTIVES

aten = torch.ops.aten


@dataclass(frozen=True)
class JoinLosses(RankPass):
    """Logarithms of a softmax over whole rows, their gradients, and those of the picked ones become torch's kernels.

        %s: f32[8, 32] = sub(%x, amax(%x, [1], True))
        %t: f32[8, 1]  = sum(exp(%s), [1], True)
        %y: f32[8, 32] = sub(%s, log(%t))                  ->  %y: f32[8, 32] = _log_softmax(%x, 1, False)
        %g: f32[8, 32] = sub(%p, mul(exp(%y), sum(%p, [1], True)))  ->  _log_softmax_backward_data(%p, %y, 1, float32)
        %p: f32[8, 32] = mul(where(eq(arange(32), %i), -1, 0), %o)  ->  nll_loss_backward(%o, %y, %i, ...)
        %l: f32[8]     = where(ne(%t, -100), neg(gather(%y, ...)), 0)       ->  nll_loss_forward(%y, %t, ...)

    For a rank's joint graph. Where the rows are split, as in a vocabulary-parallel loss, collectives stand in between,
    and all stays as it is.
    """

    keeps = (COLLECTIVES,)

    def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
        graph = module.graph
        emit = OpWriter(graph)
        for node in list(graph.nodes):
            found = _log_softmax(node)
            if found is None:
                continue
            operand, dim = found
            with graph.inserting_before(node):
                joined = emit(node, aten._log_softmax.default, operand, dim, False)
            node.replace_all_uses_with(joined)
            for gradient, tangent in _gradients(joined, dim):
                _join_gradient(graph, emit, joined, dim, gradient, tangent)
            for picked in _picking(joined, dim):
                _join_picking(graph, emit, joined, picked)
        drop_unread(graph)
        return module


def _log_softmax(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(operand, dim), if `node` is the log_softmax of rows that are whole here."""
    shifted, logarithm = called(node, aten.sub.Tensor)
    operand, largest = called(shifted, aten.sub.Tensor)
    of_largest, dims = summed(largest, aten.amax.default)
    (total,) = called(logarithm, aten.log.default, 1)
    exponential, total_dims = summed(total)
    (exponent,) = called(exponential, aten.exp.default, 1)
    if (
        operand is None
        or of_largest is not operand
        or exponent is not shifted
        or len(dims) != 1
        or total_dims != dims
    ):
        return None
    value = operand.meta["val"]
    return (operand, dims[0]) if value.is_floating_point() and value.numel() else None


@dataclass(frozen=True)
class _Picking:
    """Of each row minus the logarithm at its target, 0 where that is `ignored`; `loss` has them."""

    loss: fx.Node
    target: fx.Node
    ignored: int


def _picking(result: fx.Node, dim: int) -> list[_Picking]:
    """The losses that are read off `result`."""
    found: list[_Picking] = []
    shape = shape_of(result) or []
    if dim != len(shape) - 1:
        return found
    for user in list(result.users):
        table, along, indices = called(user, aten.gather.default, 3)
        negated = sole_user(sole_user(user, aten.reshape.default), aten.neg.default)
        loss = sole_user(negated, aten.where.self)
        kept, value, zero = called(loss, aten.where.self, 3)
        target, ignored = called(kept, aten.ne.Scalar)
        if (
            loss is None
            or table is not result
            or along != dim
            or value is not negated
            or not _is_constant(zero, 0)
        ):
            continue
        chosen, _ = called(indices, aten.reshape.default)
        same = _is_safe(chosen) and called(chosen, aten.where.self, 3)[:2] == (kept, target)
        if (
            same
            and shape_of(target) == shape_of(loss) == shape[:-1]
            and target.meta["val"].dtype == torch.int64
        ):
            found.append(_Picking(loss, target, ignored))
    return found


def _join_picking(graph: fx.Graph, emit: OpWriter, result: fx.Node, picking: _Picking) -> None:
    mean, count = _mean_of(picking.loss, result)
    last = picking.loss if mean is None else mean
    with graph.inserting_before(last):
        shape = shape_of(result) or []
        table = emit(last, aten.reshape.default, result, [-1, shape[-1]])
        places = emit(last, aten.reshape.default, picking.target, [-1])
        reduction = 0 if mean is None else 1
        made = emit(last, aten.nll_loss_forward.default, table, places, None, reduction, picking.ignored)
        value = emit(last, operator.getitem, made, 0)
        if mean is None:
            value = emit(last, aten.reshape.default, value, shape[:-1])
        elif count is not None:
            count.replace_all_uses_with(emit(last, operator.getitem, made, 1), lambda user: last < user)
    last.replace_all_uses_with(value)


def _mean_of(loss: fx.Node, result: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(the mean of the rows that are not ignored, their number), where that is all that reads `loss`."""
    mean = sole_user(sole_user(loss, aten.sum.default), aten.div.Tensor)
    total, count = called(mean, aten.div.Tensor)
    if total is None or not isinstance(count, fx.Node) or total not in loss.users:
        return None, None
    (kept,) = called(count.args[0] if count.target is aten._to_copy.default else None, aten.sum.default, 1)
    alike = count.meta["val"].dtype == total.meta["val"].dtype == result.meta["val"].dtype
    same = kept is loss.args[0] and alike
    return (mean, count) if same else (None, None)


def _gradients(result: fx.Node, dim: int) -> list[tuple[fx.Node, fx.Node]]:
    """(tangent - exp(result) * sum(tangent), tangent), wherever that is computed."""
    found: list[tuple[fx.Node, fx.Node]] = []
    for exponential in list(result.users):
        if exponential.target is not aten.exp.default:
            continue
        for product, total in others(exponential, aten.mul.Tensor):
            gradient = sole_user(product, aten.sub.Tensor)
            tangent, subtracted = called(gradient, aten.sub.Tensor)
            if gradient is not None and subtracted is product and summed(total) == (tangent, [dim]):
                found.append((gradient, tangent))
    return found


def _join_gradient(
    graph: fx.Graph, emit: OpWriter, result: fx.Node, dim: int, gradient: fx.Node, tangent: fx.Node
) -> None:
    dtype = result.meta["val"].dtype
    if tangent.meta["val"].dtype != dtype or shape_of(tangent) != shape_of(result):
        return
    with graph.inserting_before(gradient):
        picked = _picked(tangent, result, dim)
        if picked is not None and len(tangent.users) == 2:
            tangent = _write_picked(emit, result, *picked)
        joined = emit(gradient, aten._log_softmax_backward_data.default, tangent, result, dim, dtype)
    gradient.replace_all_uses_with(joined)


def _picked(tangent: fx.Node, result: fx.Node, dim: int) -> tuple[fx.Node, fx.Node] | None:
    """(weights, indices), both [..., 1]: `tangent` is minus a weight at the row's index and 0 elsewhere, as the loss of
    picked logarithms has it."""
    shape = shape_of(result) or []
    if dim != len(shape) - 1:
        return None
    for one_hot, weights in (called(tangent, aten.mul.Tensor), called(tangent, aten.mul.Tensor)[::-1]):
        chosen, minus, zero = called(one_hot, aten.where.self, 3)
        places, indices = called(chosen, aten.eq.Tensor)
        column = [*shape[:-1], 1]
        alike = shape_of(weights) == column == shape_of(indices)
        if (
            alike
            and _counts(places, shape[-1])
            and _is_constant(minus, -1)
            and _is_constant(zero, 0)
            and _is_safe(indices)
        ):
            return weights, indices
    return None


def _counts(node: Any, length: int) -> bool:
    """Whether `node` is 0, 1, ... up to `length`."""
    named = isinstance(node, fx.Node) and node.target is aten.arange.start_step
    return named and node.args == (0, length, 1)


def _is_constant(node: Any, value: float) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.full.default and tuple(node.args) == ([], value)


def _is_safe(indices: Any) -> bool:
    """Whether what is to be ignored was made 0, as the kernel wants it; other negative indices raise in the forward."""
    chosen, kept, zero = called(indices, aten.where.self, 3)
    (given, _) = called(chosen, aten.ne.Scalar)
    return given is not None and given is kept and _is_constant(zero, 0)


def _write_picked(emit: OpWriter, result: fx.Node, weights: fx.Node, indices: fx.Node) -> fx.Node:
    shape = shape_of(result) or []
    rows, length = result.meta["val"].numel() // shape[-1], shape[-1]
    flat = emit(weights, aten.reshape.default, weights, [rows])
    places = emit(weights, aten.reshape.default, indices, [rows])
    table = emit(weights, aten.reshape.default, result, [rows, length])
    total = emit(weights, aten.new_zeros.default, weights, [])  # the kernel wants one, and does not read it
    none, ignored = 0, -100
    made = emit(weights, aten.nll_loss_backward.default, flat, table, places, None, none, ignored, total)
    return emit(weights, aten.reshape.default, made, shape)
