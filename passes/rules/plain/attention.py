"""Attention, split in the batch, in heads, in queries, and round a ring (`passes.rules.plain.ring`).

A rank with causal queries [lo, hi) multiplies with the keys that they see, and no others: all queries with keys
[0, lo), and causally with keys [lo, hi). Kernels know causality from the first query on, so these are two calls. What
they find is put together by the log-sum-exp of each (online softmax); their gradients add up, as each is told the
log-sum-exp of all keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from passes.layout.layout import RING
from passes.rules.core.assemble import assemble, dims, linear_sets
from passes.rules.core.emit_op import again, argument, global_tensor, is_empty
from passes.rules.core.rule import Exchange, LocalContext, Localize, OpCall, OpRule
from passes.rules.plain.online import LENGTH, Online, added, call, visible
from passes.rules.plain.ring import ring_backward, ring_forward

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
    return _attention(call, ("out", "lse"), {}, (), (_forward, ring_forward))


def attention_backward(call: OpCall) -> OpRule:
    """grad_out, q, k, v, mask, out, lse -> b h s d, b h t d, b h t e; s: sum"""
    # out and lse are fixed, so the softmax's gradient is linear in grad_out
    return _attention(
        call, ("q", "k", "v"), {"s": "sum"}, linear_sets(call, "grad_out"), (_backward, ring_backward)
    )


def _attention(
    call: OpCall,
    results: Sequence[str],
    reductions: dict[str, str],
    linear: tuple[frozenset[int], ...],
    localize: tuple[Localize, Localize],
) -> OpRule:
    names = [name for name in call.arguments if name in _DIMS and call[name] is not None]
    queries, keys = (call.tensor(name).shape[LENGTH] for name in "qk")
    causal, masked = call["is_causal"], call["mask"] is not None

    def rule(named: Mapping[str, str], *whole: str) -> OpRule:
        # A mask may have fewer dims than the scores.
        operands = [dims(named[name].split()[-call.tensor(name).ndim :]) for name in names]
        made, whole = [dims(named[name]) for name in results], ("t", "d", "e", *whole)
        return assemble(call.shapes, operands, made, reductions=reductions, whole=whole, linear=linear)

    if not causal or masked:  # causality of a part of the queries has no place beside a mask
        return rule(_DIMS, *["s"] * causal)
    seen = _Seen(queries, keys)
    plain = replace(rule(_DIMS), work={"s": seen.in_parts}, localize=localize[0])
    if queries != keys:
        return plain
    round_ = tuple(i for i, name in enumerate((*names, *results)) if name in ("k", "v"))
    exchange = Exchange(RING, round_, tuple(range(len(names) + len(results))), unless=("b", "h"))
    ring = rule({name: text.replace("s", RING).replace(" t", f" {RING}") for name, text in _DIMS.items()})
    return replace(
        plain, others=(replace(ring, work={RING: seen.in_ring}, exchange=exchange, localize=localize[1]),)
    )


@dataclass(frozen=True)
class _Seen:
    """Of the pairs of a causal query and a key that it sees, the parts of queries [lo, hi), by call."""

    queries: int
    keys: int

    def in_parts(self, lo: int, hi: int) -> Sequence[float]:
        before, all_pairs = min(lo, self.keys) * (hi - lo), self._pairs(self.queries)
        return before / all_pairs, (self._pairs(hi) - self._pairs(lo) - before) / all_pairs

    def in_ring(self, lo: int, hi: int) -> Sequence[float]:
        """With its own keys a half and two squares cut in half; in every other round as much."""
        if hi == lo:
            return (0.0,)
        part = (hi - lo) / self.queries
        return *(part * part * share for share in (0.5, 0.25, 0.25)), *[part * part] * (round(1 / part) - 1)

    def _pairs(self, count: int) -> float:
        square = min(count, self.keys)
        return square * square / 2 + (count - square) * self.keys


def _forward(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    if not ctx.is_split("s") or is_empty(ctx, "s"):
        return again(ctx)
    queries, keys = [ctx.interval("s")], [(0, global_tensor(ctx, "k").shape[LENGTH])]
    found = Online(ctx, queries)
    for product in visible(queries, keys):
        found.add(product, call(ctx, product, {name: argument(ctx, name) for name in "qkv"}))
    return found.results()


def _backward(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    if not ctx.is_split("s") or is_empty(ctx, "s"):
        return again(ctx)
    queries, keys = [ctx.interval("s")], [(0, global_tensor(ctx, "k").shape[LENGTH])]
    given = {name: argument(ctx, name) for name in ("grad_out", "q", "k", "v", "out", "lse")}
    parts = [(product, call(ctx, product, given)) for product in visible(queries, keys)]
    spans = [(product.queries, product.keys, product.keys) for product, _ in parts]
    return tuple(
        added(ctx, [(of[i], grads[i]) for of, (_, grads) in zip(spans, parts, strict=True)], i)
        for i in range(3)
    )
