"""Rules of ops whose tensors are all of the input's shape, seen through windows, or of the output's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import fx

from passes.layout.layout import Span
from passes.layout.windows import Window
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, aten
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import LocalContext, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.windows_in_space import space_dims, space_factor

__all__ = ["Site", "windowed"]

W = TypeVar("W", bound=Window)


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
    windows_of: Callable[[OpCall, Sequence[int], Sequence[int]], Sequence[W]],
    localize: Callable[[Site[W]], Emitted],
    linear: str | None = None,
    unsplit: Callable[[LocalContext], fx.Node] = again,
) -> Callable[[int], Builder]:
    """x: a tensor of the input's shape, seen through windows; y: one of the output's. The rule by how many dims,
    the last ones, are space.

    windows_of: (call, lengths of the input, of the output) -> one window per dim of space.
    unsplit:    emits the op where space is not split.
    """
    kinds = operands + results

    def of_space(space: int) -> Builder:
        @empty_safe
        def build(call: OpCall) -> OpRule:
            lengths, counts = (call.shapes[kinds.index(kind)][-space:] for kind in "xy")
            ndim = len(call.shapes[0])
            dims, lead = space_dims(ndim, space), ndim - space
            windows = windows_of(call, lengths, counts)

            def emit(ctx: LocalContext) -> Emitted:
                site = Site(ctx, lead, windows, lengths, counts)
                return localize(site) if site.split else unsplit(ctx)

            return assemble(
                call.shapes,
                [dims] * len(operands),
                [dims] * len(results),
                linear=() if linear is None else linear_sets(call, linear),
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
