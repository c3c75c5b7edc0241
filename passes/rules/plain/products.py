"""Products of matrices: contractions, grouped products, and ops on batches of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.rules.core.assemble import (
    Dims,
    again,
    argument,
    aten,
    broadcast_dims,
    dims,
    empty_safe,
    global_tensor,
    rule_of,
    whole_rule,
)
from passes.rules.core.notation import parse, spec
from passes.rules.core.rule import Builder, Dim, LocalContext, Localize, OpCall, OpRule, TensorInfo


def contract(call: OpCall) -> OpRule:
    """autoshard::contract: the op carries its rule as an argument."""
    notation = parse(f"{_with_sums(call['equation'])}; linear: 0; linear: 1")
    return notation.bind([o.shape for o in call.operands], [call.result.shape])


def _with_sums(equation: str) -> str:
    """ "b k, n k -> n" with the sums said: also a letter of one operand alone is summed."""
    left, right = equation.split("->")
    gone = dict.fromkeys(word for word in left.replace(",", " ").split() if word not in right.split())
    return equation + "".join(f"; {word}: sum" for word in gone)


def routed_mm(call: OpCall) -> OpRule:
    """*s k, g k n, *s -> *s n; k: sum; g: sum. A rank with some of the experts gives zeros for rows of the others.
    turned: g n k."""
    rows = _rows_of(call)
    matrices = dims("g n k" if call["turned"] else "g k n")
    return _routed(call, [(*rows, ("k",)), matrices, rows], (*rows, ("n",)), {"k": "sum", "g": "sum"})


def routed_outer(call: OpCall) -> OpRule:
    """*s m, *s n, *s -> g m n; *s: sum."""
    rows = _rows_of(call)
    sums = {factor: "sum" for (factor,) in rows}
    return _routed(call, [(*rows, ("m",)), (*rows, ("n",)), rows], dims("g m n"), sums)


def own_rows(call: OpCall) -> OpRule:
    """*s *d, *s -> *s *d. A rank with some of the experts has zeros for rows of the others."""
    return _of_rows(call, 0)


def sum_rows(call: OpCall) -> OpRule:
    """*s r *d, *s r -> *s *d; r: sum. A rank with some of the experts adds up the rows of these."""
    return _of_rows(call, 1)


def _of_rows(call: OpCall, summed: int) -> OpRule:
    rows = _rows_of(call)
    kept, others = rows[: len(rows) - summed], dims(f"d{d}" for d in range(call.tensor("a").ndim - len(rows)))
    return rule_of(
        call,
        [(*rows, *others), rows],
        [(*kept, *others)],
        reductions={factor: "sum" for (factor,) in rows[len(kept) :]},
        linear="a",
        localize=_rows_of_own_experts,
    )


def _rows_of_own_experts(ctx: LocalContext) -> fx.Node:
    if ctx.is_split("g"):
        return _own_experts(ctx)
    rows = argument(ctx, "a")
    over = global_tensor(ctx, "a").ndim - node_value(ctx.node).ndim
    return ctx.call(aten.sum.dim_IntList, rows, [global_tensor(ctx, "ids").ndim - 1], False) if over else rows


def _rows_of(call: OpCall) -> tuple[Dim, ...]:
    return tuple((f"s{d}",) for d in range(call.tensor("ids").ndim))


def _routed(call: OpCall, operands: Sequence[Dims], result: Dims, reductions: dict[str, str]) -> OpRule:
    return rule_of(
        call,
        operands,
        [result],
        sizes={"g": call["count"]},
        reductions=reductions,
        linear=("a", "b"),
        localize=_own_experts,
    )


def _own_experts(ctx: LocalContext) -> fx.Node:
    """Also where it has none: rows of its tokens are sent all the same."""
    first, count = (argument(ctx, name) for name in ("first", "count"))
    if ctx.is_split("g"):
        low, high = ctx.interval("g")
        first, count = first + low, high - low
    return again(ctx, first=first, count=count)


def batched(text: str, *linear: str, localize: Localize | None = None) -> Builder:
    """text: how many dims one of a batch has, of each operand and result: "2 2 -> 2 1 0". Those are whole; the dims in
    front broadcast. Operands that are left out are the last. linear: argument names, see `linear_sets`."""
    given, made = ([int(word) for word in side.split()] for side in text.split("->"))

    @empty_safe
    def build(call: OpCall) -> OpRule:
        counts = [*given[: len(call.operands)], *made]
        pairs = list(zip((*call.operands, *call.results), counts, strict=True))
        batch = max(t.ndim - count for t, count in pairs if t is not None)
        dims = [_dims(t, count, batch) for t, count in pairs]
        n = len(call.operands)
        return rule_of(call, dims[:n], dims[n:], linear=linear, localize=localize)

    return build


def _dims(tensor: TensorInfo | None, count: int, batch: int) -> Dims:
    """None, or empty and of fewer dims: what the op was told not to compute."""
    ndim = 0 if tensor is None else tensor.ndim
    return (*broadcast_dims(max(0, ndim - count), batch), *[()] * min(count, ndim))


def diagonal(call: OpCall) -> OpRule:
    """a m n -> a k; m, n: whole"""
    operand = call.tensor("self")
    gone = [call[name] % operand.ndim for name in ("dim1", "dim2")]
    dims = [() if d in gone else (f"d{d}",) for d in range(operand.ndim)]
    kept = [dims[d] for d in range(operand.ndim) if d not in gone]
    return rule_of(call, [dims], [[*kept, ()]], linear="self")


def columns(call: OpCall) -> OpRule:
    """x d, y -> z d, or x d, y d, z -> z; d: sum. Matrices share their last dim; all else is whole."""
    dims: list[Dims] = [
        ((), ("d",)) if t is not None and t.ndim == 2 else ((),) * (0 if t is None else t.ndim)
        for t in (*call.operands, *call.results)
    ]
    n = len(call.operands)
    summed = {} if call.result.ndim == 2 else {"d": "sum"}
    return rule_of(call, dims[:n], dims[n:], reductions=summed)


def _in_multiples(ctx: LocalContext, step: int, least: int = 0) -> tuple[fx.Node, fx.Node]:
    """The matrices of a part, with zeros up to what CUDA wants: `least` rows, and multiples of `step` of k and n."""
    a, b = argument(ctx, "self"), argument(ctx, "mat2")
    (m, k), n = node_value(a).shape, node_value(b).shape[1]
    found = {"m": max(0, least - m), "k": -k % step, "n": -n % step}
    missing = {factor: more if ctx.is_split(factor) else 0 for factor, more in found.items()}
    return _padded(ctx, a, missing["m"], missing["k"]), _padded(ctx, b, missing["k"], missing["n"])


def _padded(ctx: LocalContext, x: fx.Node, rows: int, columns: int) -> fx.Node:
    return ctx.call(aten.constant_pad_nd.default, x, [0, columns, 0, rows], 0) if rows or columns else x


def _cut(ctx: LocalContext, found: fx.Node) -> fx.Node:
    """What of a product is no padding."""
    for dim, length in enumerate(ctx.result_shape()):
        if node_value(found).shape[dim] != length:
            found = ctx.call(aten.slice.Tensor, found, dim, 0, length)
    return found


def _int_product(ctx: LocalContext) -> fx.Node:
    a, b = _in_multiples(ctx, 8, 17)
    return _cut(ctx, again(ctx, self=a, mat2=b))


int_product = empty_safe(spec("m k, k n -> m n", _int_product))


@empty_safe
def scaled_product(call: OpCall) -> OpRule:
    """m k, k n, scales -> m n; k: sum. Each matrix has one scale, or one of each row of the first, of each column of
    the second: none lies along k, and sums of parts are scaled alike. Scales of blocks are whole."""
    (m, n), scales = call.result.shape, (call.tensor("scale_a").shape, call.tensor("scale_b").shape)
    if not all(math.prod(s) == 1 for s in scales) and scales != ((m, 1), (1, n)):
        return whole_rule(call)
    rest = [dims("n")] if isinstance(call["bias"], TensorInfo) else []
    rest += [((),) * len(t.shape) for t in (call["scale_result"],) if isinstance(t, TensorInfo)]
    by_row = [(("m",), ())[: len(scales[0])], ((), ("n",))[: len(scales[1])]]
    return rule_of(
        call,
        [dims("m k"), dims("k n"), *by_row, *rest],
        [dims("m n")],
        reductions={} if rest else {"k": "sum"},
        whole={"k"} if rest or call.result.dtype.itemsize == 1 else (),
        localize=_scaled,
    )


def _scaled(ctx: LocalContext) -> fx.Node:
    """CUDA and Inductor want the first matrix and the scales in rows, the second matrix in columns."""
    a, b = _in_multiples(ctx, 16)
    if not node_value(b).t().is_contiguous():
        b = ctx.call(aten.permute.default, _in_rows(ctx, ctx.call(aten.permute.default, b, [1, 0])), [1, 0])
    changed = {"self": _in_rows(ctx, a), "mat2": b}
    more = node_value(b).shape[1] - ctx.result_shape()[1]
    for name in ("scale_a", "scale_b", "bias"):
        x = argument(ctx, name)
        if x is None or node_value(x).ndim == 0:
            continue
        if more and name != "scale_a" and global_tensor(ctx, name).shape[-1] > 1:
            x = ctx.call(aten.constant_pad_nd.default, x, [0, more], 0)
        x = _in_rows(ctx, x)
        changed[name] = x if node_value(x).stride()[-1] == 1 else _line(ctx, x)
    return _cut(ctx, again(ctx, **changed))


def _in_rows(ctx: LocalContext, x: fx.Node) -> fx.Node:
    if node_value(x).is_contiguous():
        return x
    return ctx.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _line(ctx: LocalContext, x: fx.Node) -> fx.Node:
    """A column that was a row has its last stride from there; kernels look at it."""
    flat = ctx.call(aten.reshape.default, x, [-1])
    return ctx.call(aten.reshape.default, flat, list(node_value(x).shape))
