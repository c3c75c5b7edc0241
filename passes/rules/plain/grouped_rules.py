"""autoshard::grouped_mm: the groups, the jagged dim and both plain dims of the product split."""

from __future__ import annotations

from torch import fx

from passes.ops.grouped_product import kind_of
from passes.rules.core.assemble import assemble, dims
from passes.rules.core.emit_op import again, argument, aten, constant, is_empty
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import LocalContext, OpRule
from passes.rules.plain.pointwise import linear_sets

__all__ = ["grouped_mm"]

_TERMS = {
    "rows": ("l k", "g k n", "l n", {"k": "sum", "g": "sum"}),
    "columns": ("g m k", "k l", "m l", {"k": "sum", "g": "sum"}),
    "summed": ("m l", "l n", "g m n", {"l": "sum"}),
}


def grouped_mm(call: OpCall) -> OpRule:
    """rows: l k, g k n -> l n; columns: g m k, k l -> m l; summed: m l, l n -> g m n. For rows and columns, a
    rank with some of the groups gives zeros for the others, so the result is a pending sum.

    `offs` is whole on every rank: a rank needs the ends of other ranks' groups to know where its own begin.
    """
    a, b, result, reductions = _TERMS[kind_of(call.tensor("a").ndim, call.tensor("b").ndim)]
    return assemble(
        call.shapes,
        [dims(a), dims(b), dims("ends")],
        [dims(result)],
        sizes={"g": call["count"]},
        reductions=reductions,
        whole=["ends"],
        linear=linear_sets(call, "a", "b"),
        localize=_localize,
    )


def _localize(ctx: LocalContext) -> fx.Node:
    """Ends are counted from where the rank's part of the jagged dim begins; the op itself cuts them off at both ends
    of it."""
    if is_empty(ctx, "g"):
        return constant(ctx, 0)
    offs, first, count = (argument(ctx, name) for name in ("offs", "first", "count"))
    if ctx.is_split("l"):
        offs = ctx.call(aten.sub.Tensor, offs, ctx.interval("l")[0])
    if ctx.is_split("g"):
        low, high = ctx.interval("g")
        first, count = first + low, high - low
    return again(ctx, offs=offs, first=first, count=count)
