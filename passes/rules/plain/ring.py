"""Ring attention: queries, keys and values are all split along the sequence, and keys and values pass by all ranks.

    rank 0 of 2 has positions 0 to 3: pieces 0 and 1; rank 1 pieces 2 and 3
    swapped                 rank 0: pieces 0 and 3        rank 1: pieces 1 and 2
    with its own keys       0 x 0, 3 x 0, 3 x 3           1 x 1, 2 x 1, 2 x 2
    with the other's        3 x 1, 3 x 2                  1 x 0, 2 x 0
    swapped back

Mirrored pieces, p and 2 n - 1 - p of 2 n, make causal work the same on all ranks, in every round. Each rank keeps one
of its pieces and swaps the other with the mirrored rank, n - 1 - r. The backward reads queries, keys and values as the
forward swapped them. Each rank hands on the keys that it got in the round before, so a message travels while that round
is computed. Gradients of keys go from where they are computed straight to the rank that has them. All follows from the
positions, which all ranks know.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from passes.ir.joint import node_value
from passes.layout.layout import Span
from passes.rules.core.assemble import argument, aten, filled
from passes.rules.core.rule import LocalContext, Ring
from passes.rules.plain.online import (
    LENGTH,
    Online,
    Product,
    added,
    call,
    cut,
    joined,
    total,
    turned,
    visible,
)


@dataclass(frozen=True)
class _Pieces:
    """spans: of two pieces a rank. before, after: the pieces that ranks have, by number, before and after the swap."""

    spans: tuple[Span, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(parts: Sequence[Span]) -> _Pieces:
        ends = [(lo, (lo + hi + 1) // 2, hi) for lo, hi in parts]
        spans = tuple(span for lo, middle, hi in ends for span in ((lo, middle), (middle, hi)))
        n = len(parts)
        before = tuple((2 * r, 2 * r + 1) for r in range(n))
        first = (2 * r if 2 * r < n else 2 * (n - 1 - r) + 1 for r in range(n))
        return _Pieces(spans, before, tuple((p, 2 * n - 1 - p) for p in first))

    def held(self, rank: int) -> list[Span]:
        """Positions of a rank, swapped."""
        return [self.spans[piece] for piece in self.after[rank]]

    def count(self, pieces: Sequence[int]) -> int:
        return sum(hi - lo for lo, hi in (self.spans[piece] for piece in pieces))

    def sees(self, rank: int, source: int) -> bool:
        """Whether any query of the rank sees a key of the other."""
        queries, keys = ([span for span in self.held(r) if span[0] < span[1]] for r in (rank, source))
        return bool(queries and keys) and queries[-1][1] > keys[0][0]


def ring_forward(ctx: LocalContext) -> tuple[fx.Node | None, ...]:
    if _has_no_rows(ctx):
        return tuple(filled(ctx, ctx.result_shape(i), 0, node_value(ctx.node, i)) for i in (0, 1))
    run = _Run.of(ctx)
    q, k, v = run.swapped([argument(ctx, name) for name in "qkv"])
    found = Online(ctx, run.pieces.held(run.index))
    for source, keys, values in run.rounds(k, v):
        for product in run.products(source):
            found.add(product, call(ctx, product, {"q": q, "k": keys, "v": values}))
    return tuple(run.swapped(found.results(), back=True))


def ring_backward(ctx: LocalContext) -> tuple[fx.Node | None, ...]:
    if _has_no_rows(ctx):
        return tuple(filled(ctx, ctx.result_shape(i), 0, node_value(ctx.node, i)) for i in range(3))
    run = _Run.of(ctx)
    names = ("grad_out", "q", "out", "lse", "k", "v")
    *fixed, k, v = run.swapped([argument(ctx, name) for name in names])
    given = dict(zip(names, fixed, strict=False))
    queries: list[tuple[Span, fx.Node]] = []
    mine: list[list[fx.Node]] = []
    late: list[fx.Node] = []
    for source, keys, values in run.rounds(k, v):
        parts = [(p, call(ctx, p, {**given, "k": keys, "v": values})) for p in run.products(source)]
        queries += [(product.queries, grads[0]) for product, grads in parts]
        length = run.pieces.count(run.pieces.after[source])
        made = [
            added(ctx, [(p.keys, grads[i]) for p, grads in parts], i, length)
            for i in (1, 2)
            if parts or source == run.index
        ]
        # What arrives is looked at behind the products of the round after.
        mine = [run.summed(mine, late, (k, v))] if late else mine
        if source == run.index:
            mine, late = [made], list[fx.Node]()
        else:
            late = run.returned(source, made, (k, v))
    grads = [added(ctx, queries, 0), *run.summed(mine, late, (k, v))]
    like = [node_value(ctx.node, i).dtype for i in range(3)]
    return tuple(run.swapped([total(ctx, [x], d) for x, d in zip(grads, like, strict=True)], back=True))


def _has_no_rows(ctx: LocalContext) -> bool:
    """No sample or no head: all ranks of the ring know, and exchange nothing."""
    return not math.prod(node_value(argument(ctx, "q")).shape[:LENGTH])


@dataclass(frozen=True)
class _Run:
    """One rank's part of the op."""

    ctx: LocalContext
    ring: Ring
    pieces: _Pieces

    @staticmethod
    def of(ctx: LocalContext) -> _Run:
        assert ctx.ring is not None
        return _Run(ctx, ctx.ring, _Pieces.of(ctx.ring.parts))

    @property
    def index(self) -> int:
        return self.ring.index

    @property
    def ranks(self) -> range:
        return range(len(self.ring.parts))

    def products(self, source: int) -> list[Product]:
        return visible(self.pieces.held(self.index), self.pieces.held(source))

    def rounds(self, k: fx.Node, v: fx.Node) -> Iterator[tuple[int, fx.Node, fx.Node]]:
        """The rank whose keys are here, they and their values, in every round; the next are on their way meanwhile."""
        n = len(self.ranks)
        before, after = (self.index - 1) % n, (self.index + 1) % n
        source, arrived = self.index, self._flat([k, v])
        for number in range(n):
            coming = (source - 1) % n
            if number < n - 1:
                sizes = {after: node_value(arrived).numel()}, {before: self._numel([k, v], coming)}
                arrived = self._exchange(arrived, *sizes)
            yield source, k, v
            if number < n - 1:
                source, (k, v) = coming, self._cut(arrived, [k, v], coming)

    def returned(self, source: int, made: Sequence[fx.Node], like: Sequence[fx.Node]) -> list[fx.Node]:
        """Send gradients of another rank's keys to it; those of this rank's that arrive, from the rank as far on."""
        n, far = len(self.ranks), self.index - source
        if not any(self.pieces.sees((rank + far) % n, rank) for rank in self.ranks):
            return []
        other = (self.index + far) % n
        flat = self._flat(made) if made else filled(self.ctx, [0], 0, node_value(like[0]))
        receives = self.pieces.sees(other, self.index)
        into = self._numel(like, self.index) if receives else 0
        arrived = self._exchange(flat, {source: node_value(flat).numel()}, {other: into})
        return [arrived] if receives else list[fx.Node]()

    def summed(
        self, summands: Sequence[Sequence[fx.Node]], arrived: Sequence[fx.Node], like: Sequence[fx.Node]
    ) -> list[fx.Node]:
        """In a wider dtype, with what has arrived of this rank's keys and values."""
        wide = node_value(argument(self.ctx, "lse")).dtype
        summands = [*summands, *(self._cut(x, like, self.index) for x in arrived)]
        return [total(self.ctx, column, wide) for column in zip(*summands, strict=True)]

    def swapped(self, tensors: Sequence[fx.Node], *, back: bool = False) -> list[fx.Node]:
        """Their pieces that this rank has after the swap, or before it. Those of one dtype go in one message."""
        found = dict[fx.Node, fx.Node]() if back else self.ring.kept
        left = [x for x in tensors if x not in found]
        for dtype in dict.fromkeys(node_value(x).dtype for x in left):
            alike = [x for x in left if node_value(x).dtype == dtype]
            found.update(zip(alike, self._swapped(alike, back), strict=True))
        return [found[x] for x in tensors]

    def _swapped(self, tensors: list[fx.Node], back: bool) -> list[fx.Node]:
        have, want = (self.pieces.after, self.pieces.before)[:: 1 if back else -1]
        mine, pieces = have[self.index], self.pieces
        ends = itertools.accumulate((pieces.count([p]) for p in mine), initial=0)
        places = dict(zip(mine, itertools.pairwise(ends), strict=True))
        messages = [[p for p in mine if p in want[rank] and rank != self.index] for rank in self.ranks]
        flats = [
            self._flat([cut(self.ctx, x, places[p]) for x in tensors]) for p in itertools.chain(*messages)
        ]
        coming = [
            [p for p in have[rank] if p in want[self.index] and rank != self.index] for rank in self.ranks
        ]
        width = sum(self._width(x) for x in tensors)
        if not flats:  # of an odd number of ranks the one in the middle
            flats = [filled(self.ctx, [0], 0, node_value(tensors[0]))]
        arrived = self._exchange(
            self._cat(flats),
            {rank: width * pieces.count(message) for rank, message in enumerate(messages)},
            {rank: width * pieces.count(message) for rank, message in enumerate(coming)},
        )
        parts = {p: [cut(self.ctx, x, places[p]) for x in tensors] for p in mine if p in want[self.index]}
        start = 0
        for piece in itertools.chain(*coming):
            size = pieces.count([piece])
            one = self.ctx.call(aten.slice.Tensor, arrived, 0, start, start + width * size)
            parts[piece] = self._parted(one, tensors, size)
            start += width * size
        return [joined(self.ctx, [parts[p][i] for p in want[self.index]]) for i, _ in enumerate(tensors)]

    def _exchange(self, flat: fx.Node, *sizes: dict[int, int]) -> fx.Node:
        """sizes: of what is sent to ranks, and of what comes from them."""
        return self.ring.exchange(flat, *([of.get(rank, 0) for rank in self.ranks] for of in sizes))

    def _numel(self, tensors: Sequence[fx.Node], rank: int) -> int:
        return sum(map(self._width, tensors)) * self.pieces.count(self.pieces.after[rank])

    def _width(self, x: fx.Node) -> int:
        """Elements of one position."""
        shape = node_value(x).shape
        return math.prod((*shape[:LENGTH], *shape[LENGTH + 1 :]))

    def _flat(self, tensors: Sequence[fx.Node]) -> fx.Node:
        """In memory as kernels leave them, heads inside."""
        flat = lambda x: self.ctx.call(aten.reshape.default, turned(self.ctx, x), [node_value(x).numel()])
        return self._cat([*map(flat, tensors)])

    def _cat(self, flat: list[fx.Node]) -> fx.Node:
        return flat[0] if len(flat) == 1 else self.ctx.call(aten.cat.default, flat, 0)

    def _cut(self, flat: fx.Node, like: Sequence[fx.Node], rank: int) -> list[fx.Node]:
        """The inverse: tensors as these, of all that a rank has."""
        return self._parted(flat, like, self.pieces.count(self.pieces.after[rank]))

    def _parted(self, flat: fx.Node, like: Sequence[fx.Node], count: int) -> list[fx.Node]:
        found: list[fx.Node] = []
        start = 0
        for x in like:
            batch, heads, _, *size = node_value(x).shape
            shape = [batch, count, heads, *size]
            end = start + math.prod(shape)
            part = self.ctx.call(aten.slice.Tensor, flat, 0, start, end)
            found.append(turned(self.ctx, self.ctx.call(aten.view.default, part, shape)))
            start = end
        return found
