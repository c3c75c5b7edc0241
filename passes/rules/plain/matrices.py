"""Ops on batches of matrices: factorizations, solves, determinants. What is in front of a matrix is split."""

from __future__ import annotations

from torch import fx

from passes.rules.core.assemble import Dims, assemble
from passes.rules.core.emit_op import again, argument, aten, global_tensor
from passes.rules.core.opcall import Builder, OpCall, TensorInfo
from passes.rules.core.rule import LocalContext, Localize, OpRule
from passes.rules.core.spec import spec
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import broadcast_dims, linear_sets

__all__ = ["batched", "columns", "diagonal", "int_product"]


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
        return assemble(call.shapes, dims[:n], dims[n:], linear=linear_sets(call, *linear), localize=localize)

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
    return assemble(call.shapes, [dims], [[*kept, ()]], linear=linear_sets(call, "self"))


def columns(call: OpCall) -> OpRule:
    """x d, y -> z d, or x d, y d, z -> z; d: sum. Matrices share their last dim; all else is whole."""
    dims: list[Dims] = [
        ((), ("d",)) if t is not None and t.ndim == 2 else ((),) * (0 if t is None else t.ndim)
        for t in (*call.operands, *call.results)
    ]
    n = len(call.operands)
    summed = {} if call.result.ndim == 2 else {"d": "sum"}
    return assemble(call.shapes, dims[:n], dims[n:], reductions=summed)


def _int_product(ctx: LocalContext) -> fx.Node:
    """CUDA wants more than 16 rows, and multiples of 8 of the other dims: what a part lacks is zeros, cut off again."""
    if not any(ctx.is_split(factor) for factor in "mkn"):
        return again(ctx)
    m, n = ctx.result_shape()
    k = global_tensor(ctx, "mat2").shape[0]
    if ctx.is_split("k"):
        low, high = ctx.interval("k")
        k = high - low
    more = max(0, 17 - m), -k % 8, -n % 8
    a, b = (
        ctx.call(aten.constant_pad_nd.default, argument(ctx, name), [0, columns, 0, rows], 0)
        for name, rows, columns in (("self", more[0], more[1]), ("mat2", more[1], more[2]))
    )
    found = again(ctx, self=a, mat2=b)
    for dim, length in enumerate((m, n)):
        found = ctx.call(aten.slice.Tensor, found, dim, 0, length)
    return found


int_product = empty_safe(spec("m k, k n -> m n", _int_product))
