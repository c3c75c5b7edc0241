"""How one tensor dim may be split, and the moves between splits of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_model.mesh import MeshSpec
from passes.layout.layout import (
    Halo,
    JoinedAxes,
    Span,
    Unit,
    chained,
    in_units,
    laps,
    nested_sizes,
    orders,
    spans_of,
)

Ints = npt.NDArray[np.int64]
Sizes = tuple[int, ...]


class Split(NamedTuple):
    """Axes of one dim, major to minor, and its sizes (None: nested `torch.chunk`), or what is held of it instead."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None
    halo: Halo | None = None


UNSPLIT = Split((), None)


class DimSpec(NamedTuple):
    """What a dim's moves depend on: nothing, unless some split of it has explicit sizes or a halo.

    length is 0 when `explicit` is empty, so that dims of any length share their moves.
    """

    length: int
    explicit: tuple[Split, ...]


@dataclass(frozen=True)
class DimSplits:
    """The moves between splits of a dim. Every move is exact for uneven and explicit sizes. joined: axes that are
    moved together."""

    mesh: MeshSpec
    spec: DimSpec
    joined: JoinedAxes = ()
    prefixes: dict[tuple[int, tuple[str, ...], int], tuple[Sizes, Sizes | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def known(self) -> dict[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Explicit sizes worth moving to, by axes: those given, and what gathering makes of them."""
        found: dict[tuple[str, ...], dict[tuple[int, ...], None]] = {}
        for split in self.spec.explicit:
            if split.halo is not None:
                continue
            for count in range(len(split.axes), 0, -1):
                sizes = self.prefix(split, count)
                if sizes is not None:
                    found.setdefault(split.axes[:count], {}).setdefault(sizes)
        return {axes: tuple(sizes) for axes, sizes in found.items()}

    def normal(self, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        default = nested_sizes(self.spec.length, tuple(self.mesh.size(a) for a in axes))
        return None if sizes == default else sizes

    def prefix(self, split: Split, count: int) -> tuple[int, ...] | None:
        """Sizes over the first `count` axes: a part's size is the sum of its sub-parts'.

        Nested chunks add up to the chunks they were made from, so None stays None.
        """
        if split.sizes is None:
            return None
        key = id(split.sizes), split.axes, count
        if key not in self.prefixes:
            step = self.mesh.size(*split.axes[count:])
            sums = tuple(np.add.reduceat(split.sizes, range(0, len(split.sizes), step)).tolist())
            # With the sizes, so that their id stays their own.
            self.prefixes[key] = split.sizes, self.normal(split.axes[:count], sums)
        return self.prefixes[key][1]

    def gathers(self, split: Split) -> Iterator[tuple[tuple[str, ...], Split]]:
        """(run of minor-most axes, what is left when it is gathered)."""
        if split.halo is not None:
            return
        units = in_units(split.axes, self.joined)
        for left in reversed(range(len(units))):
            count = len(chained(units[:left]))
            yield split.axes[count:], Split(split.axes[:count], self.prefix(split, count))

    def refinements(self, split: Split, run: tuple[str, ...]) -> list[Split]:
        """The splits by `run` at the minor end whose parts lie within the parts of `split`."""
        if split.halo is not None:
            return []
        axes = split.axes + run
        first: tuple[int, ...] | None = None
        if split.sizes is not None:
            counts = tuple(self.mesh.size(a) for a in run)
            nested = itertools.chain.from_iterable(nested_sizes(size, counts) for size in split.sizes)
            first = self.normal(axes, tuple(nested))
        finer = [Split(axes, first)]
        for sizes in self.known.get(axes, ()):
            candidate = Split(axes, sizes)
            if sizes != first and self.prefix(candidate, len(split.axes)) == split.sizes:
                finer.append(candidate)
        return finer

    def reshards(self, split: Split) -> Iterator[tuple[tuple[str, ...], Split]]:
        """(axes to exchange over, another split by the same axes)."""
        if split.halo is not None:
            return
        for axes in orders(split.axes, self.joined):
            for sizes in (None, *self.known.get(axes, ())):
                other = Split(axes, sizes)
                if other != split:
                    yield axes[self.common(split, other) :], other

    def halos(self, axes: tuple[str, ...], summed: bool) -> list[Split]:
        """The known splits by `axes` that hold a halo."""
        return [
            s for s in self.spec.explicit if s.axes == axes and s.halo is not None and s.halo.summed == summed
        ]

    def exchanges(self, split: Split) -> list[Split]:
        """What exchanging halos makes of `split`."""
        return self.halos(split.axes, summed=False) if split.axes and split.halo is None else []

    def trims(self, split: Split) -> list[Split]:
        """What every rank can cut out of the halo it holds: narrower ones, and any split by the same axes."""
        if split.halo is None or split.halo.summed:
            return []
        held = split.halo.spans
        plain = [Split(split.axes, sizes) for sizes in (None, *self.known.get(split.axes, ()))]
        others = [*plain, *self.halos(split.axes, summed=False)]
        return [
            other
            for other in others
            if other != split and all(_contains(h, p) for h, p in zip(held, self.parts(other), strict=True))
        ]

    def sums(self, split: Split) -> list[Split]:
        """What adding up makes of summands: any split by the same axes."""
        if split.halo is None or not split.halo.summed:
            return []
        return [Split(split.axes, sizes) for sizes in (None, *self.known.get(split.axes, ()))]

    def parts(self, split: Split) -> tuple[Span, ...]:
        """What is held per linear index over the split's axes. Needs `spec.length`."""
        if split.halo is not None:
            return split.halo.spans
        counts = tuple(self.mesh.size(a) for a in split.axes)
        sizes = nested_sizes(self.spec.length, counts) if split.sizes is None else split.sizes
        return spans_of(sizes)

    def foreign(self, held: Split, wanted: Split) -> float | None:
        """What part of its shard the rank with most sends or receives; None if lengths or axes leave it open."""
        if not self.spec.length or held.axes != wanted.axes:
            return None
        return _foreign_share(self.parts(held), self.parts(wanted), self.spec.length)

    def common(self, one: Split, two: Split) -> int:
        """Number of major axes over which both splits make the same parts."""
        count = 0
        while one.axes[: count + 1] == two.axes[: count + 1] and count < len(one.axes):
            if self.prefix(one, count + 1) != self.prefix(two, count + 1):
                break
            count += 1
        return count


def _contains(one: Span, two: Span) -> bool:
    return two[0] >= two[1] or (one[0] <= two[0] and two[1] <= one[1])


def subsets(units: Sequence[Unit]) -> Iterator[tuple[Unit, ...]]:
    """Every non-empty subset, in the order of `units`."""
    for count in range(1, len(units) + 1):
        yield from itertools.combinations(units, count)


@lru_cache(maxsize=4096)
def _foreign_share(held: tuple[Span, ...], wanted: tuple[Span, ...], length: int) -> float:
    return foreign_elements(held, wanted, length) / max(1, *(hi - lo for lo, hi in held))


def foreign_elements(held: tuple[Span, ...], wanted: tuple[Span, ...], length: int) -> int:
    """The most that any rank sends to, or receives from, others when spans `held` become spans `wanted`, of a dim of
    `length`. Positions count modulo the length; what several ranks hold, each of them sends."""
    if not length or not held:
        return 0
    before, after = np.array(held, dtype=np.int64), np.array(wanted, dtype=np.int64)
    if min(before.min(), after.min()) >= 0 and max(before.max(), after.max()) <= length:
        first, last = np.maximum(before, after)[:, 0], np.minimum(before, after)[:, 1]
        own = np.maximum(0, last - first)
    else:
        own = np.array([_shared(one, two, length) for one, two in zip(held, wanted, strict=True)])
    received, sent = _met(after, before, length) - own, _met(before, after, length) - own
    return int(max(received.max(), sent.max()))


def _shared(one: Span, two: Span, length: int) -> int:
    return sum(hi - lo for (lo, hi), _ in laps(one, two, length))


def _met(spans: Ints, others: Ints, length: int) -> Ints:
    """[spans]: positions that each has in common with `others`, added up over all of them, in n log n steps."""
    rounds, rest = np.divmod(np.maximum(others[:, 1] - others[:, 0], 0), length)
    first = others[:, 0] % length
    last = first + rest
    # What is left of each beside whole rounds of the dim, in [0, length): a part, and what wraps around its end.
    starts = np.sort(np.concatenate([first, np.zeros_like(first)]))
    ends = np.sort(np.concatenate([np.minimum(last, length), np.maximum(last - length, 0)]))

    def behind(edges: Ints, places: Ints) -> Ints:
        """By how much the places lie behind all edges that are before them, added up."""
        count = np.searchsorted(edges, places)
        return count * places - np.concatenate([[0], np.cumsum(edges)])[count]

    def up_to(positions: Ints) -> Ints:
        laps, places = np.divmod(positions, length)
        covered = behind(starts, places) - behind(ends, places)
        return laps * rest.sum() + covered + positions * rounds.sum()

    return up_to(np.maximum(spans[:, 0], spans[:, 1])) - up_to(spans[:, 0])


def sort_key(split: Split) -> tuple[object, ...]:
    """For one order of splits everywhere."""
    halo = () if split.halo is None else (split.halo.summed, split.halo.spans)
    return split.axes, split.sizes or (), halo
