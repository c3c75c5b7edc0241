"""Attention, split in the batch, in heads, in queries, in keys, and round a ring (`passes.rules.plain.ring`).

Grouped heads are split by heads of keys, each with all heads of queries that see it; or, more finely, by heads of
queries, with keys whole. Of these a rank takes the heads of keys that its queries see. Where it has more heads of
queries of one group than of another, it writes them out, each as often as a query sees it. Gradients of keys are its
summands, and zero for the other heads.

A rank with causal queries [lo, hi) multiplies with the keys that they see, and no others: all queries with keys
[0, lo), and causally with keys [lo, hi). Kernels know causality from the first query on, so these are two calls. What
they find is put together by the log-sum-exp of each (online softmax); their gradients add up, as each is told the
log-sum-exp of all keys.

Of keys in parts, all ranks have the same queries [Flash-Decoding]. What moves is as long as the queries, and keys stay
where they are: a cache that is split by its sequence. Gradients need no exchange: the backward knows the log-sum-exp of
all keys.

    rank 0: out, lse of its keys        rank 1: out, lse of its keys
    all ranks are told all of these, and merge them by log-sum-exp

Where a query sees the last keys alone, keys are read with a halo, as by a convolution, and a part is the same op.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.ir.op_traits import schema_arguments
from passes.layout.layout import KEYS, RING
from passes.rules.core.assemble import again, argument, aten, filled, global_tensor, is_empty, rule_of
from passes.rules.core.rule import Dim, Exchange, LocalContext, Localize, OpCall, OpRule, Ring
from passes.rules.plain.online import LENGTH, Online, Seen, added, arguments, call, cast, visible
from passes.rules.plain.ring import ring_backward, ring_forward


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
        found.add(product, call(ctx, product, arguments(ctx, *"qkv")))
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


_DIMS = {
    "grad_out": "b h s e",
    "q": "b h s d",
    "k": "b g t d",
    "v": "b g t e",
    "mask": "b h s t",
    "out": "b h s e",
    "lse": "b h s",
    "documents": "b h s o",
    "of_keys": "b h t o",
}
_BESIDE: Mapping[str, Dim] = {"t": ("s",)}
_AROUND: Mapping[str, Dim] = {"s": (RING,), "t": (RING,)}


def attention(call: OpCall) -> OpRule:
    """b h s d, b g t d, b g t e, b h s t -> b h s e, b h s, where g is h, or h is (g r)"""
    return _attention(call, ("out", "lse"), {}, (), (_forward, ring_forward, split_keys_forward))


def attention_backward(call: OpCall) -> OpRule:
    """grad_out, q, k, v, mask, out, lse -> b h s d, b g t d, b g t e; s: sum; heads of queries: sum"""
    # out and lse are fixed, so the softmax's gradient is linear in grad_out
    ways = _backward, ring_backward, again
    return _attention(call, ("q", "k", "v"), {"s": "sum", KEYS: "sum"}, "grad_out", ways)


def _attention(
    call: OpCall,
    results: Sequence[str],
    reductions: dict[str, str],
    linear: str | tuple[()],
    localize: tuple[Localize, Localize, Localize],
) -> OpRule:
    names = [name for name in call.arguments if name in _DIMS and call[name] is not None]
    queries, keys = (call.tensor(name).shape[LENGTH] for name in "qk")
    heads, groups = (call.tensor(name).shape[HEADS] for name in "qk")
    is_backward = bool(reductions)
    if heads != groups and is_backward:
        reductions = {**reductions, "h": "sum", "r": "sum"}

    def rule(words: Mapping[str, Dim], *whole: str, **more: Any) -> OpRule:
        read = lambda name: [words.get(word, (word,)) for word in _DIMS[name].split()]
        # A mask may have fewer dims than the scores.
        operands = [read(name)[-call.tensor(name).ndim :] for name in names]
        made, whole = list(map(read, results)), ("t", "d", "e", *whole)
        return rule_of(call, operands, made, reductions=reductions, whole=whole, linear=linear, **more)

    def ways(words: Mapping[str, Dim], *whole: str) -> list[OpRule]:
        """In parts of queries, and round a ring."""
        if not causal or masked:  # causality of a part of the queries has no place beside a mask
            return [rule(words, *whole, *["s"] * causal)]
        if seen.window:
            halo = rule(
                {**words, **_BESIDE}, *whole, windows=dict.fromkeys(of_keys, seen.halo), localize=again
            )
            # A window is long, and to bring its keys takes less time than to compute them again.
            return [replace(halo, work={"s": seen.in_halo}, chains=False)]
        in_parts = replace(rule(words, *whole), work={"s": seen.in_parts}, localize=localize[0])
        if queries != keys or call["documents"] is not None:
            return [in_parts]
        ring = rule({**words, **_AROUND}, *whole)
        return [
            in_parts,
            replace(ring, work={RING: seen.in_ring}, exchange=around_ring, localize=localize[1]),
        ]

    def of_keys_in_parts(words: Mapping[str, Dim], unless: tuple[str, ...]) -> list[OpRule]:
        """Of what is causal the ring is for, but of a prompt before keys that are yet to come."""
        if keys == 1 or (causal and (masked or seen.window or queries >= keys or is_backward)):
            return []
        # A row of the result beside its log-sum-exp, in the dtype of that.
        told = () if is_backward else (every.index("lse"),)
        exchange = Exchange(KEYS, gathered=told, width=call.tensor("v").shape[-1] + 1)
        way = rule({**words, "t": (KEYS,)}, *["s"] * causal, exchange=exchange)
        work = {KEYS: seen.in_keys} if causal else {}
        return [replace(way, work=work, localize=localize[2], unless=unless)]

    causal, masked = call["is_causal"], call["mask"] is not None
    seen = Seen(queries, keys, call["window"])
    every = (*names, *results)
    around = tuple(i for i, name in enumerate(every) if name in ("k", "v"))
    of_keys = [(i, LENGTH) for i in around]
    # The forward swaps what it is given, the backward what it is given beside that.
    swapped = tuple(
        i for i, name in enumerate(every) if i >= len(names) or not is_backward or name not in "qkv"
    )
    around_ring = Exchange(RING, around, swapped)
    if groups in (1, heads):
        alike: dict[str, Dim] = {"g": ("h",)}
        found = [replace(way, unless=("b", "h")) for way in ways(alike)]
        found += of_keys_in_parts(alike, ("b", *["h"] * (groups > 1)))
    else:
        by_group = ways({"h": ("g", "r")})
        finer = [replace(way, refines="g", localize=within_groups(way.localize)) for way in ways({}, "g")]
        pairs = zip(by_group, finer, strict=True)
        found = [replace(way, unless=("b", "g")) for way in itertools.chain(*pairs)]
        found += of_keys_in_parts({"h": ("g", "r")}, ("b", "g"))
    return replace(found[0], others=tuple(found[1:]))


def _forward(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    if not ctx.is_split("s") or is_empty(ctx, "s"):
        return again(ctx)
    queries, keys = [ctx.interval("s")], [(0, global_tensor(ctx, "k").shape[LENGTH])]
    found = Online(ctx, queries)
    for product in visible(queries, keys):
        found.add(product, call(ctx, product, arguments(ctx, *"qkv")))
    return found.results()


def _backward(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    if not ctx.is_split("s") or is_empty(ctx, "s"):
        return again(ctx)
    queries, keys = [ctx.interval("s")], [(0, global_tensor(ctx, "k").shape[LENGTH])]
    given = arguments(ctx, "grad_out", "q", "k", "v", "out", "lse")
    parts = [(product, call(ctx, product, given)) for product in visible(queries, keys)]
    spans = [(product.queries, product.keys, product.keys) for product, _ in parts]
    return tuple(
        added(ctx, [(of[i], grads[i]) for of, (_, grads) in zip(spans, parts, strict=True)], i)
        for i in range(3)
    )


HEADS = 1
"""The dim of heads."""


def within_groups(localize: Localize | None) -> Localize:
    """`localize`, or the op itself, of the heads of keys that a rank's part of factor `h` sees."""

    def localized(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
        local = _SeenKeys.of(ctx)
        made = again(local) if localize is None else localize(local)
        count = len(ctx.node.meta["val"])
        each = (
            made if isinstance(made, tuple) else [ctx.call(operator.getitem, made, i) for i in range(count)]
        )
        return tuple(
            local.whole(x, i) if x is not None and local.is_of_keys(i) else x for i, x in enumerate(each)
        )

    return localized


@dataclass(frozen=True)
class _SeenKeys(LocalContext):
    """`LocalContext` with the keys and values that are seen. first: head of them; counts: heads of queries that see
    each."""

    ctx: LocalContext
    first: int
    counts: tuple[int, ...]
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(ctx: LocalContext) -> _SeenKeys:
        heads, groups = (global_tensor(ctx, name).shape[HEADS] for name in "qk")
        (lo, hi), each = ctx.interval("h"), heads // groups
        first, last = (lo // each, -(-hi // each)) if lo < hi else (0, 0)
        counts = tuple(min(hi, (g + 1) * each) - max(lo, g * each) for g in range(first, last))
        here = _SeenKeys(ctx, first, counts, ctx.node, ctx.args, ctx.kwargs)
        names = [argument.name for argument in schema_arguments(ctx.node.target)]
        args = [here.taken(x) if name in ("k", "v") else x for name, x in zip(names, ctx.args, strict=False)]
        return replace(here, args=tuple(args))

    @property
    def ring(self) -> Ring | None:
        return self.ctx.ring

    def interval(self, factor: str) -> tuple[int, int]:
        return self.ctx.interval(factor)

    def is_split(self, factor: str) -> bool:
        return self.ctx.is_split(factor)

    def result_shape(self, index: int = 0) -> list[int]:
        shape = self.ctx.result_shape(index)
        if self.is_of_keys(index):
            shape[HEADS] = len(self.counts) if self._is_even else sum(self.counts)
        return shape

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.ctx.call(target, *args, **kwargs)

    def is_of_keys(self, index: int) -> bool:
        """Whether result `index` is a gradient of keys or values."""
        return len(self.node.meta["val"]) == 3 and index > 0

    @property
    def _is_even(self) -> bool:
        """Whether all are seen by as many heads, which the op itself takes."""
        return len(set(self.counts)) < 2

    def taken(self, x: fx.Node) -> fx.Node:
        """Of keys or values, with a head for each of queries where groups are not even."""
        seen = self._heads(x, self.first, self.first + len(self.counts))
        if self._is_even:
            return seen
        shape = list(node_value(x).shape)
        wide = lambda i, count: self.call(
            aten.expand.default, self._heads(seen, i, i + 1), [*shape[:HEADS], count, *shape[HEADS + 1 :]]
        )
        return self.call(aten.cat.default, [wide(i, count) for i, count in enumerate(self.counts)], HEADS)

    def whole(self, grad: fx.Node, index: int) -> fx.Node:
        """The inverse, of gradients."""
        if not self._is_even:
            places = itertools.pairwise(itertools.accumulate(self.counts, initial=0))
            parts = [self._heads(grad, *place) for place in places]
            grad = self.call(
                aten.cat.default, [self.call(aten.sum.dim_IntList, x, [HEADS], True) for x in parts], HEADS
            )
        groups = self.ctx.result_shape(index)[HEADS]
        before, after = self.first, groups - self.first - len(self.counts)
        pads = [0, 0] * (node_value(grad).ndim - HEADS - 1)
        return (
            self.call(aten.constant_pad_nd.default, grad, [*pads, before, after], 0)
            if before or after
            else grad
        )

    def _heads(self, x: fx.Node, lo: int, hi: int) -> fx.Node:
        whole = (lo, hi) == (0, node_value(x).shape[HEADS])
        return x if whole else self.call(aten.slice.Tensor, x, HEADS, lo, hi)
