"""autoshard::attention and its backward: batch, heads and queries split."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from passes.rules.core.assemble import assemble, dims
from passes.rules.core.emit_op import again, argument, aten, global_tensor, positions
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, LocalContext, OpRule
from passes.rules.plain.pointwise import linear_sets

__all__ = ["attention", "attention_backward"]

_DIMS = {
    "grad_out": "b h s e",
    "q": "b h s d",
    "k": "b h t d",
    "v": "b h t e",
    "mask": "b h s t",
    "out": "b h s e",
    "lse": "b h s",
}


def attention(call: OpCall) -> OpRule:
    """b h s d, b h t d, b h t e, b h s t -> b h s e, b h s"""
    return _rule(call, [dims("b h s e"), dims("b h s")], {}, ())


def attention_backward(call: OpCall) -> OpRule:
    """grad_out, q, k, v, mask, out, lse -> b h s d, b h t d, b h t e; s: sum"""
    results = [dims("b h s d"), dims("b h t d"), dims("b h t e")]
    # out and lse are fixed, so the softmax's gradient is linear in grad_out
    return _rule(call, results, {"s": "sum"}, linear_sets(call, "grad_out"))


def _rule(
    call: OpCall,
    results: Sequence[Sequence[Dim]],
    reductions: dict[str, str],
    linear: tuple[frozenset[int], ...],
) -> OpRule:
    present = [name for name in call.arguments if name in _DIMS and call[name] is not None]
    operands = [_right_aligned(_DIMS[name], call.tensor(name).ndim) for name in present]
    # Beside another mask, causality has no place in one.
    both = call["is_causal"] and call["mask"] is not None
    whole = ["t", "d", "e", *(["s"] if both else [])]
    by_position = call["is_causal"] or call["mask_is_causal"]
    return assemble(
        call.shapes,
        operands,
        results,
        reductions=reductions,
        whole=whole,
        linear=linear,
        repeated={"s": 2.0} if by_position else {},
        localize=_localize if by_position else None,
    )


def _localize(ctx: LocalContext) -> fx.Node:
    """A part of the queries reads a mask: kernels know causality of queries from 0 on. They compute what it hides."""
    if not ctx.is_split("s"):
        return again(ctx)
    if argument(ctx, "mask_is_causal"):
        return again(ctx, mask_is_causal=False)
    low, high = ctx.interval("s")
    queries = ctx.call(aten.reshape.default, positions(ctx, low, high), [1, 1, high - low, 1])
    keys = positions(ctx, 0, global_tensor(ctx, "k").shape[2])
    return again(ctx, mask=ctx.call(aten.le.Tensor, keys, queries), is_causal=False)


def _right_aligned(names: str, ndim: int) -> tuple[Dim, ...]:
    """A mask may have fewer dims than the scores."""
    return dims(names.split()[len(names.split()) - ndim :])
