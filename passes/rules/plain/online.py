"""Attention in parts: which products there are, and how what they find is put together (online softmax)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.layout.layout import Span
from passes.layout.windows import SlidingWindow
from passes.ops.attention_window import keys_multiplied
from passes.rules.core.assemble import again, argument, aten, filled, global_tensor
from passes.rules.core.rule import LocalContext

LENGTH = 2
"""The dim of queries, and of keys."""


@dataclass(frozen=True)
class Product:
    """Queries and keys of one call, as places in what is at hand. causal: both begin at the same position."""

    queries: Span
    keys: Span
    causal: bool


@dataclass(frozen=True)
class Seen:
    """Of the pairs of a causal query and a key that it sees, the parts of queries [lo, hi), by call. window: how many
    keys, its own the last, a query sees; 0: all."""

    queries: int
    keys: int
    window: int

    @property
    def halo(self) -> SlidingWindow:
        return SlidingWindow(self.keys, self.window, before=self.window - 1 - (self.keys - self.queries))

    def in_halo(self, lo: int, hi: int) -> Sequence[float]:
        first, last = self.halo.reads(lo, hi)
        with_keys = [keys_multiplied(keys, self.window) for keys in (last - first, self.keys)]
        return ((hi - lo) * with_keys[0] / (self.queries * with_keys[1]),)

    def in_parts(self, lo: int, hi: int) -> Sequence[float]:
        before, all_pairs = min(lo, self.keys) * (hi - lo), self._pairs(self.queries)
        return before / all_pairs, (self._pairs(hi) - self._pairs(lo) - before) / all_pairs

    def in_keys(self, lo: int, hi: int) -> Sequence[float]:
        """Of keys: queries behind them see all, those of the same positions a half."""
        first, last = min(lo, self.queries), min(hi, self.queries)
        pairs = (self.queries - last) * (hi - lo), (last - first) ** 2 / 2
        return tuple(part / self._pairs(self.queries) for part in pairs if part) or (0.0,)

    def in_ring(self, lo: int, hi: int) -> Sequence[float]:
        """With its own keys a half and two squares cut in half; in every other round as much."""
        if hi == lo:
            return (0.0,)
        part = (hi - lo) / self.queries
        return *(part * part * share for share in (0.5, 0.25, 0.25)), *[part * part] * (round(1 / part) - 1)

    def _pairs(self, count: int) -> float:
        square = min(count, self.keys)
        return square * square / 2 + (count - square) * self.keys


def visible(queries: Sequence[Span], keys: Sequence[Span]) -> list[Product]:
    """What causal queries of these positions see of keys of those. Both rise; queries begin in a piece of keys, or with
    one."""
    full: list[Product] = []
    square: list[Product] = []
    for (lo, hi), (begin, end) in placed(queries):
        before = 0
        for (first, last), (at, _) in placed(keys) if lo < hi else ():
            before += max(0, min(lo, last) - first)
            if first <= lo < last:
                square.append(Product((begin, end), (at + lo - first, at + min(hi, last) - first), True))
        if before and full and full[-1].keys == (0, before) and full[-1].queries[1] == begin:
            full[-1] = replace(full[-1], queries=(full[-1].queries[0], end))
        elif before:
            full.append(Product((begin, end), (0, before), False))
    return [*full, *square]


def placed(pieces: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Pieces side by side: (positions, places)."""
    at = 0
    for lo, hi in pieces:
        yield (lo, hi), (at, at + hi - lo)
        at += hi - lo


def arguments(ctx: LocalContext, *names: str) -> dict[str, fx.Node]:
    """Those that there are, with what says of which documents queries and keys are."""
    found = {name: argument(ctx, name) for name in (*names, "documents", "of_keys")}
    return {name: x for name, x in found.items() if x is not None}


def call(ctx: LocalContext, product: Product, given: Mapping[str, fx.Node]) -> list[fx.Node]:
    """Results of the op of some queries and some keys. given: of all that is at hand, by argument."""
    changes = {
        name: cut(ctx, x, product.keys if name in ("k", "v", "of_keys") else product.queries)
        for name, x in given.items()
    }
    made = again(ctx, is_causal=product.causal, **changes)
    return [ctx.call(operator.getitem, made, i) for i, _ in enumerate(made.meta["val"])]


def cut(ctx: LocalContext, x: fx.Node, span: Span) -> fx.Node:
    """Of the dim of queries or keys."""
    whole = span == (0, node_value(x).shape[LENGTH])
    return x if whole else ctx.call(aten.slice.Tensor, x, LENGTH, *span)


def joined(ctx: LocalContext, parts: Sequence[fx.Node]) -> fx.Node:
    """In memory as kernels leave them: of log-sum-exps heads are outside, of all else inside."""
    if len(parts) == 1:
        return parts[0]
    if node_value(parts[0]).ndim == LENGTH + 1:
        return ctx.call(aten.cat.default, list(parts), LENGTH)
    return turned(ctx, ctx.call(aten.cat.default, [turned(ctx, x) for x in parts], 1))


def turned(ctx: LocalContext, x: fx.Node) -> fx.Node:
    """[b, h, s, d] as [b, s, h, d], [b, h, s] as [b, s, h]; turned twice it is as before."""
    return ctx.call(aten.permute.default, x, [0, 2, 1, *range(3, node_value(x).ndim)])


def cast(ctx: LocalContext, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if node_value(x).dtype == dtype else ctx.call(aten._to_copy.default, x, dtype=dtype)


class Online:
    """The results of attention by pieces of queries, as products of them with more keys come in."""

    def __init__(self, ctx: LocalContext, queries: Sequence[Span]) -> None:
        self._ctx = ctx
        self._found: dict[Span, tuple[fx.Node, fx.Node]] = {}
        self._places = [place for _, place in placed(queries) if place[0] < place[1]]

    def add(self, product: Product, results: Sequence[fx.Node]) -> None:
        begin, end = product.queries
        for lo, hi in self._places:
            if begin <= lo and hi <= end:
                out, lse = (cut(self._ctx, x, (lo - begin, hi - begin)) for x in results)
                one = self._found.get((lo, hi))
                self._found[lo, hi] = (out, lse) if one is None else self._merged(one, (out, lse))

    def _merged(self, *parts: tuple[fx.Node, fx.Node]) -> tuple[fx.Node, fx.Node]:
        """Of queries that see both sets of keys; out in the wider dtype of its log-sum-exp."""
        call = self._ctx.call
        lse = call(aten.logaddexp.default, *(own for _, own in parts))
        terms: list[fx.Node] = []
        for out, own in parts:
            weight = call(aten.unsqueeze.default, call(aten.exp.default, call(aten.sub.Tensor, own, lse)), -1)
            terms.append(call(aten.mul.Tensor, cast(self._ctx, out, node_value(lse).dtype), weight))
        return call(aten.add.Tensor, *terms), lse

    def results(self) -> tuple[fx.Node, fx.Node]:
        """out and lse of all pieces."""
        ctx, dtype = self._ctx, node_value(self._ctx.node).dtype
        if not self._places:
            out, lse = (node_value(ctx.node, i) for i in (0, 1))
            return filled(ctx, ctx.result_shape(0), 0, out), filled(ctx, ctx.result_shape(1), 0, lse)
        found = [self._found.get(place) or self._unseeing(place) for place in self._places]
        return joined(ctx, [cast(ctx, out, dtype) for out, _ in found]), joined(
            ctx, [lse for _, lse in found]
        )

    def _unseeing(self, place: Span) -> tuple[fx.Node, fx.Node]:
        """Of queries that see none of the keys."""
        ctx, least = self._ctx, torch.finfo(node_value(self._ctx.node, 1).dtype).min
        shapes = ([*s[:LENGTH], place[1] - place[0], *s[LENGTH + 1 :]] for s in map(ctx.result_shape, (0, 1)))
        out, lse = (
            filled(ctx, shape, value, node_value(ctx.node, i))
            for i, (shape, value) in enumerate(zip(shapes, (0, least), strict=True))
        )
        return out, lse


def added(
    ctx: LocalContext, parts: Sequence[tuple[Span, fx.Node]], index: int, length: int | None = None
) -> fx.Node:
    """A gradient like result `index`, of summands of spans of it. length: of it, if not the result's."""
    shape = ctx.result_shape(index)
    length = shape[LENGTH] if length is None else length
    ends = sorted({0, length, *itertools.chain.from_iterable(span for span, _ in parts)})
    runs = list(itertools.pairwise(ends)) or [(0, 0)]
    return joined(ctx, [_sum(ctx, parts, run, index, shape) for run in runs])


def _sum(
    ctx: LocalContext, parts: Sequence[tuple[Span, fx.Node]], run: Span, index: int, shape: Sequence[int]
) -> fx.Node:
    """Of the parts that have `run`, each of which has all of it."""
    covering = [
        cut(ctx, part, (run[0] - lo, run[1] - lo))
        for (lo, hi), part in parts
        if lo <= run[0] and run[1] <= hi
    ]
    like = node_value(ctx.node, index)
    if not covering:
        return filled(ctx, [*shape[:LENGTH], run[1] - run[0], *shape[LENGTH + 1 :]], 0, like)
    return total(ctx, covering, like.dtype)


def total(ctx: LocalContext, summands: Sequence[fx.Node], dtype: torch.dtype) -> fx.Node:
    """Added in the wider dtype of log-sum-exps."""
    found, *others = summands
    for other in others:
        wide = global_tensor(ctx, "lse").dtype
        found = ctx.call(aten.add.Tensor, cast(ctx, found, wide), cast(ctx, other, wide))
    return cast(ctx, found, dtype)
