"""Attention of which each rank has a part of the keys, and all of them the same queries [Flash-Decoding].

    rank 0: out, lse of its keys        rank 1: out, lse of its keys
    all ranks are told all of these, and merge them by log-sum-exp

What moves is as long as the queries, and keys stay where they are: a cache that is split by its sequence. Gradients
need no exchange: the backward knows the log-sum-exp of all keys.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.layout.layout import KEYS
from passes.rules.core.emit_op import again, argument, aten, filled, global_tensor, is_empty
from passes.rules.core.rule import LocalContext
from passes.rules.plain.online import LENGTH, Online, arguments, cast, visible
from passes.rules.plain.online import call as called


def split_keys_forward(ctx: LocalContext) -> tuple[fx.Node, ...]:
    """out and lse, the same on all ranks. Of a query that sees no key at all, lse is the least number of its dtype."""
    assert ctx.ring is not None
    call, is_causal = ctx.call, argument(ctx, "is_causal")
    out, lse = _causal(ctx) if is_causal else _masked(ctx)
    lse = call(aten.unsqueeze.default, lse, -1)
    size, wide = node_value(out).shape[-1], node_value(lse).dtype
    found = ctx.ring.gathered(call(aten.cat.default, [cast(ctx, out, wide), lse], -1))
    outs, lses = (call(aten.slice.Tensor, found, -1, *span) for span in ((0, size), (size, size + 1)))
    most = call(aten.amax.default, lses, [0])
    weights = call(aten.exp.default, call(aten.sub.Tensor, lses, most))
    total = call(aten.sum.dim_IntList, weights, [0])
    mixed = call(aten.sum.dim_IntList, call(aten.mul.Tensor, outs, weights), [0])
    of_all = call(aten.add.Tensor, most, call(aten.log.default, total))
    merged = cast(ctx, call(aten.div.Tensor, mixed, total), node_value(out).dtype)
    return merged, call(aten.squeeze.dim, of_all, -1)


def _causal(ctx: LocalContext) -> tuple[fx.Node, fx.Node]:
    """A prompt before keys that are yet to come: queries before the rank's keys see none of them, those behind all."""
    keys, length = ctx.interval(KEYS), global_tensor(ctx, "q").shape[LENGTH]
    ends = sorted({0, length, *(min(end, length) for end in keys)})
    queries = list(itertools.pairwise(ends))
    found = Online(ctx, queries)
    for product in visible(queries, [keys]):
        found.add(product, called(ctx, product, arguments(ctx, *"qkv")))
    return found.results()


def _masked(ctx: LocalContext) -> tuple[fx.Node, fx.Node]:
    """A log-sum-exp of a query that sees no key of the rank's is as each kernel has it: it is the least number here."""
    made, mask = again(ctx), argument(ctx, "mask")
    out, lse = (ctx.call(operator.getitem, made, i) for i in (0, 1))
    if mask is None or is_empty(ctx, KEYS):
        return out, lse
    value, like = node_value(mask), node_value(lse)
    if value.dtype == torch.bool:
        hidden = ctx.call(aten.logical_not.default, ctx.call(aten.any.dim, mask, -1))
    else:
        most = ctx.call(aten.amax.default, mask, [-1])
        hidden = ctx.call(aten.le.Scalar, most, torch.finfo(value.dtype).min)
    return out, ctx.call(aten.where.self, hidden, filled(ctx, [], torch.finfo(like.dtype).min, like), lse)
