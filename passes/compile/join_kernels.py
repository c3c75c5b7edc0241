"""Norms and losses that capture took apart, in torch's own kernels again."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from passes.compile.join_linears import (
    Bound,
    OpWriter,
    Pattern,
    drop_unread,
    is_read_elsewhere,
    matches,
    op,
    shape_of,
)
from passes.ir.graph_pass import RankPass
from passes.ir.graph_properties import COLLECTIVES
from passes.ir.op_traits import is_cast

aten = torch.ops.aten
add, sub, mul, div = (op(getattr(aten, name).Tensor) for name in ("add", "sub", "mul", "div"))
total, largest, where = op(aten.sum.dim_IntList), op(aten.amax.default), op(aten.where.self)
exp, reshape, full, sum_all = (op(getattr(aten, name).default) for name in ("exp", "reshape", "full", "sum"))

# A norm, with the gradients of its operands.
X, DIMS, COUNT, EPS, WEIGHT, BIAS, TANGENT, LEAD = (Pattern() for _ in range(8))
MEAN = div(total(X, DIMS, True), COUNT)
CENTER = sub(X, MEAN)
VARIANCE = div(total(mul(CENTER, CENTER), DIMS, True), COUNT)
DEVIATION = op(aten.rsqrt.default)(add(VARIANCE, EPS))
HAT = mul(CENTER, DEVIATION)
SCALED = mul(HAT, WEIGHT)
NORMS = (add(SCALED, BIAS), SCALED, HAT)
WEIGHED = mul(TANGENT, WEIGHT) | TANGENT
X_AGAIN = Pattern()  # as the backward has it, which may cast it and normalise it once more
HAT_AGAIN = mul(sub(X_AGAIN, MEAN), DEVIATION)
ALONG = mul(HAT_AGAIN, total(mul(WEIGHED, HAT_AGAIN), DIMS, True))
OF_X = mul(div(DEVIATION, COUNT), sub(sub(mul(WEIGHED, COUNT), total(WEIGHED, DIMS, True)), ALONG))
OF_WEIGHT = total(mul(TANGENT, HAT_AGAIN), LEAD, False)
OF_BIAS = total(TANGENT, LEAD, False)

# A logarithm of a softmax, with its gradient; the loss of the ones picked.
DIM, LENGTH, PICKED_AT, TARGET, IGNORED, WEIGHTS = (Pattern() for _ in range(6))
SHIFTED = sub(X, largest(X, [DIM], True))
LOG_SOFTMAX = sub(SHIFTED, op(aten.log.default)(total(exp(SHIFTED), [DIM], True)))
LOGS = op(aten._log_softmax.default)(X, DIM, False)
AT_COLUMN = where(op(aten.ne.Scalar)(PICKED_AT, IGNORED), PICKED_AT, full([], 0))
PLACES = op(aten.arange.start_step)(0, LENGTH, 1)
MINUS_PICKED = mul(where(op(aten.eq.Tensor)(PLACES, AT_COLUMN), full([], -1), full([], 0)), WEIGHTS)
OF_LOGS = MINUS_PICKED | TANGENT
OF_LOGITS = sub(OF_LOGS, mul(exp(LOGS), total(OF_LOGS, [DIM], True)))
KEPT = op(aten.ne.Scalar)(TARGET, IGNORED)
GATHERED = op(aten.gather.default)(LOGS, DIM, reshape(where(KEPT, TARGET, full([], 0)), Pattern()))
ROW_LOSS = where(KEPT, op(aten.neg.default)(reshape(GATHERED, Pattern())), full([], 0))
ROWS_KEPT = op(aten._to_copy.default)(sum_all(KEPT))
MEAN_LOSS = div(sum_all(ROW_LOSS), ROWS_KEPT)


class JoinKernels(RankPass):
    """Sums and pointwise ops over whole rows become torch's kernels: layer norms, logarithms of a softmax, losses of
    what is picked of these, and their gradients.

        %m: f32[8, 1]  = div(sum(%x, [1], True), 16)      %n: (...)    = native_layer_norm(%x, [16], %w, %b, 1e-05)
        %c: f32[8, 16] = sub(%x, %m)                      %y: f32[8, 16] = getitem(%n, 0)
        %v: f32[8, 1]  = div(sum(mul(%c, %c), [1], True), 16)
        %r: f32[8, 1]  = rsqrt(add(%v, 1e-05))        ->
        %h: f32[8, 16] = mul(%c, %r)
        %y: f32[8, 16] = add(mul(%h, %w), %b)

    For a rank's joint graph: what the backward reads is saved then. Where a rank holds a part of each row (a sharded
    norm, a vocabulary-parallel loss), a collective stands between sum and division, and all stays as it is. Half
    precision is cast before and after: torch's own kernel for it would round mean and deviation on CPUs. Groups of a
    group norm are rows as well.
    """

    keeps = (COLLECTIVES,)

    def rewrite(self, graph: fx.Graph) -> None:
        emit = OpWriter(graph)
        _join_norms(graph, emit)
        for pattern, write in _LOSSES:
            for node in list(graph.nodes):
                for bound in matches(pattern, node, {}):
                    with graph.inserting_before(node):
                        made = write(emit, node, bound)
                    if made is not None:
                        node.replace_all_uses_with(made)
                        break
        drop_unread(graph)


def _join_norms(graph: fx.Graph, emit: OpWriter) -> None:
    gradients: dict[fx.Node, Bound] = {}
    for node in graph.nodes:
        for bound in matches(OF_X, node, {}):
            row = WEIGHT not in bound or _is_row(bound[WEIGHT], bound)
            if row and shape_of(bound[TANGENT]) == shape_of(bound[X]) and _alike(bound[X], bound[X_AGAIN]):
                gradients.setdefault(bound[DEVIATION], bound)
    joined: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):  # a sum with the bias before the product in it
        for pattern in NORMS:
            for bound in matches(pattern, node, {}):
                hat = bound[HAT]
                free = hat not in joined and _is_norm(bound)
                if free and _join_norm(graph, emit, node, bound, gradients.get(bound[DEVIATION])):
                    joined.add(hat)


def _is_norm(bound: Bound) -> bool:
    """Of whole rows, at the end of the shape."""
    shape, dims = shape_of(bound[X]), bound[DIMS]
    if shape is None or bound[X].meta["val"].dtype not in (torch.float32, torch.float64) or 0 in shape:
        return False
    rows = len(shape) - len(dims)
    return (
        rows > 0
        and list(dims) == list(range(rows, len(shape)))
        and bound[COUNT] == math.prod(shape[rows:])
        and isinstance(bound[EPS], float)
        and all(_is_row(bound[operand], bound) for operand in (WEIGHT, BIAS) if operand in bound)
    )


def _is_row(node: Any, bound: Bound) -> bool:
    """Of the shape that is normalised, and of the same dtype."""
    shape = shape_of(bound[X]) or []
    same = isinstance(node, fx.Node) and node.meta["val"].dtype == bound[X].meta["val"].dtype
    return same and shape_of(node) == shape[len(shape) - len(bound[DIMS]) :]


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether they are the same, or casts of the same, whatever their strides."""
    casts = is_cast(one) and is_cast(other) and one.args == other.args
    return one is other or (casts and one.meta["val"].dtype == other.meta["val"].dtype)


def _join_norm(graph: fx.Graph, emit: OpWriter, result: fx.Node, norm: Bound, of_x: Bound | None) -> bool:
    """Whether it was: not if another reads what the kernel does not leave, or reads its moments before they are."""
    x, weight, bias = norm[X], norm.get(WEIGHT), norm.get(BIAS)
    rows = (shape_of(x) or [])[-len(norm[DIMS]) :]
    of_weight, of_bias = ({}, {}) if of_x is None else _of_row(of_x, norm)
    inner = [pattern for pattern in (CENTER, HAT, SCALED) if norm.get(pattern) is not result]
    if is_read_elsewhere(inner, norm, of_x or {}, of_weight):
        return False
    moments = norm[MEAN], norm[DEVIATION]
    read = [[user for user in moment.users if user not in (norm[CENTER], norm[HAT])] for moment in moments]
    if any(user < result for users in read for user in users):
        return False
    with graph.inserting_before(result):
        made = emit(x, aten.native_layer_norm.default, x, rows, weight, bias, norm[EPS])
        new, *kept = (emit(x, operator.getitem, made, i) for i in range(3))
    if of_x is not None:
        weight = of_x.get(WEIGHT)
        last = of_x[OF_X]
        ends = [last, of_weight.get(OF_WEIGHT), of_bias.get(OF_BIAS)]
        wanted = [True, *(weight is not None and end is not None for end in ends[1:])]
        with graph.inserting_before(last):
            # Of the bias the kernel reads the shape alone, which is the weight's.
            operands = of_x[TANGENT], of_x[X_AGAIN], rows, *kept, weight, weight
            made = emit(last, aten.native_layer_norm_backward.default, *operands, wanted)
            found = [emit(last, operator.getitem, made, i) if wanted[i] else None for i in range(3)]
        for before, after in zip(ends, found, strict=True):
            if before is not None and after is not None:
                before.replace_all_uses_with(after)
    result.replace_all_uses_with(new)
    for old, now, users in zip(moments, kept, read, strict=True):
        old.replace_all_uses_with(now, users.__contains__)
    return True


def _of_row(of_x: Bound, norm: Bound) -> tuple[Bound, Bound]:
    """The gradients of weight and bias, where they come after that of x; {} without."""
    tangent, hat = of_x[TANGENT], of_x[HAT_AGAIN]
    lead = list(range(len(shape_of(hat) or []) - len(norm[DIMS])))
    known = {TANGENT: tangent, HAT_AGAIN: hat, LEAD: lead}

    def first(pattern: Pattern, nodes: Iterable[fx.Node]) -> Bound:
        later = (node for node in nodes if of_x[OF_X] < node)
        return next((bound for node in later for bound in matches(pattern, node, known)), {})

    of_weight = first(OF_WEIGHT, [user for product in hat.users for user in product.users])
    return of_weight, first(OF_BIAS, tangent.users)


def _log_softmax(emit: OpWriter, node: fx.Node, bound: Bound) -> fx.Node | None:
    value = bound[X].meta["val"]
    if not value.is_floating_point() or not value.numel():
        return None
    return emit(node, aten._log_softmax.default, bound[X], bound[DIM], False)


def _of_logits(emit: OpWriter, node: fx.Node, bound: Bound) -> fx.Node | None:
    """Where the tangent is minus a weight at each row's index and 0 elsewhere, it is made by the loss's kernel. That
    takes the index of what is to be ignored as 0; other negative ones raise in the forward."""
    logs, tangent, dim = bound[LOGS], bound[OF_LOGS], bound[DIM]
    value, shape = logs.meta["val"], shape_of(logs) or []
    if tangent.meta["val"].dtype != value.dtype or shape_of(tangent) != shape:
        return None
    if WEIGHTS in bound:
        column = [*shape[:-1], 1]
        alike = shape_of(bound[WEIGHTS]) == column == shape_of(bound[AT_COLUMN])
        if not alike or bound[LENGTH] != shape[-1] or dim != len(shape) - 1 or len(tangent.users) != 2:
            return None
        flat = emit(node, aten.reshape.default, bound[WEIGHTS], [math.prod(column)])
        at = emit(node, aten.reshape.default, bound[AT_COLUMN], [math.prod(column)])
        table = emit(node, aten.reshape.default, logs, [math.prod(column), shape[-1]])
        count = emit(node, aten.new_zeros.default, flat, [])  # the kernel wants one, and does not read it
        made = emit(node, aten.nll_loss_backward.default, flat, table, at, None, 0, -100, count)
        tangent = emit(node, aten.reshape.default, made, shape)
    return emit(node, aten._log_softmax_backward_data.default, tangent, logs, dim, value.dtype)


def _row_loss(emit: OpWriter, node: fx.Node, bound: Bound) -> fx.Node | None:
    """And the mean of the rows that are not ignored, with their number."""
    logs, target, loss = bound[LOGS], bound[TARGET], bound[ROW_LOSS]
    shape = shape_of(logs) or []
    mean = MEAN_LOSS in bound
    same = shape_of(target) == shape_of(loss) == shape[:-1] and target.meta["val"].dtype == torch.int64
    counted = (bound[ROWS_KEPT], node) if mean else ()
    alike = all(each.meta["val"].dtype == logs.meta["val"].dtype for each in counted)
    if not same or not alike or bound[DIM] != len(shape) - 1:
        return None
    table = emit(node, aten.reshape.default, logs, [-1, shape[-1]])
    at = emit(node, aten.reshape.default, target, [-1])
    made = emit(node, aten.nll_loss_forward.default, table, at, None, int(mean), bound[IGNORED])
    value = emit(node, operator.getitem, made, 0)
    if not mean:
        return emit(node, aten.reshape.default, value, shape[:-1])
    count = emit(node, operator.getitem, made, 1)
    bound[ROWS_KEPT].replace_all_uses_with(count, lambda user: node < user)
    return value


_LOSSES: tuple[tuple[Pattern, Callable[[OpWriter, fx.Node, Bound], fx.Node | None]], ...] = (
    (LOG_SOFTMAX, _log_softmax),
    (OF_LOGITS, _of_logits),
    (MEAN_LOSS, _row_loss),
    (ROW_LOSS, _row_loss),
)
"""In this order: gradients and losses are told by the kernel before them."""
