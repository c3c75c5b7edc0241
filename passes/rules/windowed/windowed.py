"""Ops whose tensors are all of the input's shape, seen through windows, or of the output's: their rules.

The last dims of a tensor are space, whose factors y0, y1, ... are those of an op's results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import fx

from passes.layout.layout import Span
from passes.layout.windows import Window
from passes.rules.core.assemble import Groups, again, aten, empty_safe, rule_of
from passes.rules.core.rule import Builder, Dim, LocalContext, OpCall, OpRule

W = TypeVar("W", bound=Window)
Placed = tuple[fx.Node, fx.Node]
"""(positions along a dim, what belongs there)."""


def space_factor(dim: int) -> str:
    """The factor of a dim of space, counted from 0."""
    return f"y{dim}"


def space_dims(ndim: int, space: int) -> tuple[Dim, ...]:
    """Dims of a tensor whose last `space` dims are space, and whose others just pass."""
    lead = ndim - space
    return (*((f"b{d}",) for d in range(lead)), *((space_factor(d),) for d in range(space)))


def per_dim(values: int | Sequence[int], space: int) -> list[int]:
    """One number, or a list of one, means that number for every dim."""
    found = [values] if isinstance(values, int) else [int(n) for n in values]
    return found * space if len(found) == 1 else found


def windows_of(make: Callable[..., W], lengths: Sequence[int], *lists: int | Sequence[int]) -> list[W]:
    """One per dim of space. lists: kernel, stride, dilation and padding, of each dim or one for all."""
    each = zip(lengths, *(per_dim(values, len(lengths)) for values in lists), strict=True)
    return [make(*numbers) for numbers in each]


def pad_space(ctx: LocalContext, x: fx.Node, sides: Sequence[tuple[int, int]], fill: float = 0) -> fx.Node:
    """`fill` before and after every dim of space, of which there are as many as `sides`; negative numbers cut."""
    flat = [n for pair in reversed(sides) for n in pair]
    if not any(n > 0 for n in flat):  # a view will do
        return _cut(ctx, x, sides)
    return ctx.call(aten.constant_pad_nd.default, x, flat, fill)


def _cut(ctx: LocalContext, x: fx.Node, sides: Sequence[tuple[int, int]]) -> fx.Node:
    for d, (before, after) in enumerate(sides):
        if before or after:
            # From the end of the tensor, whose length is not known here: slices count negative ends so.
            x = ctx.call(aten.slice.Tensor, x, d - len(sides), -before, after or 2**63 - 1)
    return x


def unpad_space(ctx: LocalContext, x: fx.Node, sides: Sequence[tuple[int, int]]) -> fx.Node:
    """What `pad_space` has padded with `sides`."""
    return pad_space(ctx, x, [(-before, -after) for before, after in sides])


def scattered(ctx: LocalContext, like: fx.Node, sizes: Sequence[int], dim: int, *parts: Placed) -> fx.Node:
    """Zeros of `sizes`, with every part added at its places of `dim`: the transpose of picking these places."""
    total = ctx.call(aten.new_zeros.default, like, list(sizes))
    for places, part in parts:
        total = ctx.call(aten.index_add.default, total, dim, places, part)
    return total


def relocated(
    ctx: LocalContext,
    index: fx.Node,
    lengths: Sequence[int],
    onto: Sequence[int],
    move: Callable[[int, fx.Node], fx.Node],
) -> fx.Node:
    """Places in a flat array of `lengths` as places in one of `onto`; `move` takes a dim and the positions along it."""
    total: fx.Node | None = None
    for d in range(len(lengths)):
        inner, width = math.prod(lengths[d + 1 :]), math.prod(onto[d + 1 :])
        at = ctx.call(aten.div.Tensor_mode, index, inner, rounding_mode="floor")
        index = ctx.call(aten.remainder.Scalar, index, inner)
        at = move(d, at)
        at = at if width == 1 else ctx.call(aten.mul.Tensor, at, width)
        total = at if total is None else ctx.call(aten.add.Tensor, total, at)
    assert total is not None
    return total


@dataclass(frozen=True)
class Site(Generic[W]):
    """A windowed op on one rank: what its rule read of the op, and the rank's part of space.

    lead: the dims before space. windows: one per dim of space. lengths, counts: along each, of the input and of the
    results in all. factor: the name of a dim's factor.
    """

    ctx: LocalContext
    lead: int
    windows: Sequence[W]
    lengths: Sequence[int]
    counts: Sequence[int]
    factor: Callable[[int], str] = space_factor

    @property
    def split(self) -> list[int]:
        """The dims of space that some axis splits."""
        return [d for d in range(len(self.windows)) if self.ctx.is_split(self.factor(d))]

    def results(self, dim: int) -> Span:
        """This rank's along a dim of space (of which there is no factor if there is but one)."""
        return self.ctx.interval(self.factor(dim)) if dim in self.split else (0, self.counts[dim])

    def reads(self, dim: int) -> Span:
        """What this rank has of the input along a dim of space."""
        return self.windows[dim].reads(*self.results(dim)) if dim in self.split else (0, self.lengths[dim])

    def at_home(self, dim: int, places: fx.Node, sign: int = -1) -> fx.Node:
        """Positions in the whole input as positions in what this rank has of it; the other way with sign 1."""
        first, move = self.reads(dim)[0], aten.add.Tensor if sign > 0 else aten.sub.Tensor
        return self.ctx.call(move, places, first) if first else places

    @property
    def result_lengths(self) -> list[int]:
        return [hi - lo for lo, hi in map(self.results, range(len(self.windows)))]

    @property
    def input_lengths(self) -> list[int]:
        return [hi - lo for lo, hi in map(self.reads, range(len(self.windows)))]

    def empty_padded(self, like: fx.Node, sides: Sequence[tuple[int, int]]) -> fx.Node:
        """A tensor of the input's shape, padded, for a backward that reads no more of it: nothing need be put
        together. The op's first result is of the input's shape."""
        lengths = [n + sum(side) for n, side in zip(self.input_lengths, sides, strict=True)]
        return self.ctx.call(aten.new_empty.default, like, [*self.ctx.result_shape()[: self.lead], *lengths])


Emitted = fx.Node | tuple[fx.Node | None, ...]


def windowed(
    operands: str,
    results: str,
    seen: Callable[[OpCall, Sequence[int], Sequence[int]], Sequence[W]],
    localize: Callable[[Site[W]], Emitted],
    linear: Groups = (),
    unsplit: Callable[[LocalContext], fx.Node] = again,
) -> Callable[[int], Builder]:
    """x: a tensor of the input's shape, seen through windows; y: one of the output's. The rule by how many dims,
    the last ones, are space.

    seen: (call, lengths of the input, of the output) -> one window per dim of space.
    unsplit: emits the op where space is not split.
    """
    kinds = operands + results

    def of_space(space: int) -> Builder:
        @empty_safe
        def build(call: OpCall) -> OpRule:
            lengths, counts = (call.shapes[kinds.index(kind)][-space:] for kind in "xy")
            ndim = len(call.shapes[0])
            dims, lead = space_dims(ndim, space), ndim - space
            windows = seen(call, lengths, counts)

            def emit(ctx: LocalContext) -> Emitted:
                site = Site(ctx, lead, windows, lengths, counts)
                return localize(site) if site.split else unsplit(ctx)

            return rule_of(
                call,
                [dims] * len(operands),
                [dims] * len(results),
                linear=linear,
                windows={
                    (t, lead + d): window
                    for t, kind in enumerate(kinds)
                    if kind == "x"
                    for d, window in enumerate(windows)
                },
                localize=emit,
            )

        return build

    return of_space


@dataclass(frozen=True)
class Taps:
    """What each of `results` results of one dim is made of.

    places:  int64[results * count], positions in this rank's operand.
    weights: [results, count], of the operand's dtype; None: there is one position, of weight 1.
    """

    results: int
    count: int
    places: fx.Node
    weights: fx.Node | None = None


def mixed(site: Site[Any], x: fx.Node, taps: Callable[[int], Taps]) -> fx.Node:
    """`x`, a rank's input, with the results in place of each dim of space."""
    ctx, shape = site.ctx, [*site.ctx.result_shape()[: site.lead], *site.input_lengths]
    for d in range(len(site.windows)):
        dim, found = site.lead + d, taps(d)
        x = ctx.call(aten.index_select.default, x, dim, found.places)
        if found.weights is not None:
            x = ctx.call(
                aten.reshape.default, x, [*shape[:dim], found.results, found.count, *shape[dim + 1 :]]
            )
            x = ctx.call(aten.sum.dim_IntList, _weighted(ctx, x, found, len(shape) - 1 - dim), [dim + 1])
        shape[dim] = found.results
    return x


def mixed_back(site: Site[Any], grad: fx.Node, taps: Callable[[int], Taps]) -> fx.Node:
    """Of the gradient of `mixed`, that of its input."""
    ctx, shape = site.ctx, site.ctx.result_shape()
    for d in reversed(range(len(site.windows))):
        dim, found = site.lead + d, taps(d)
        before, after = [*shape[: site.lead], *site.result_lengths[:d]], shape[dim + 1 :]
        if found.weights is not None:
            each = ctx.call(aten.unsqueeze.default, grad, dim + 1)
            each = _weighted(ctx, each, found, len(after))
            grad = ctx.call(aten.reshape.default, each, [*before, found.results * found.count, *after])
        grad = scattered(ctx, grad, [*before, shape[dim], *after], dim, (found.places, grad))
    return grad


def _weighted(ctx: LocalContext, x: fx.Node, taps: Taps, after: int) -> fx.Node:
    shaped = ctx.call(aten.view.default, taps.weights, [taps.results, taps.count, *[1] * after])
    return ctx.call(aten.mul.Tensor, x, shaped)
