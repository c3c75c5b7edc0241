"""How one tensor dim may be split, and the moves between splits of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cost_model.mesh import MeshSpec
from passes.layout import nested_sizes

__all__ = ["UNSPLIT", "DimSpec", "DimSplits", "Split", "subsets"]


class Split(NamedTuple):
    """Axes of one dim, major to minor, and its sizes (None: nested `torch.chunk`)."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None


UNSPLIT = Split((), None)


class DimSpec(NamedTuple):
    """What a dim's moves depend on: nothing, unless some split of it has explicit sizes.

    length is 0 when `explicit` is empty, so that dims of any length share their moves.
    """

    length: int
    explicit: tuple[Split, ...]


@dataclass(frozen=True)
class DimSplits:
    """The moves between splits of a dim. Every move is exact for uneven and explicit sizes."""

    mesh: MeshSpec
    spec: DimSpec

    @cached_property
    def known(self) -> dict[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Explicit sizes worth moving to, by axes: those given, and what gathering makes of them."""
        found: dict[tuple[str, ...], dict[tuple[int, ...], None]] = {}
        for split in self.spec.explicit:
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
        step = self.mesh.size(*split.axes[count:])
        sums = tuple(sum(split.sizes[i : i + step]) for i in range(0, len(split.sizes), step))
        return self.normal(split.axes[:count], sums)

    def gathers(self, split: Split) -> Iterator[tuple[tuple[str, ...], Split]]:
        """(run of minor-most axes, what is left when it is gathered)."""
        for count in reversed(range(len(split.axes))):
            yield split.axes[count:], Split(split.axes[:count], self.prefix(split, count))

    def refinements(self, split: Split, run: tuple[str, ...]) -> list[Split]:
        """The splits by `run` at the minor end whose parts lie within the parts of `split`."""
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
        for axes in itertools.permutations(split.axes):
            for sizes in (None, *self.known.get(axes, ())):
                other = Split(axes, sizes)
                if other != split:
                    yield axes[self.common(split, other) :], other

    def common(self, one: Split, two: Split) -> int:
        """Number of major axes over which both splits make the same parts."""
        count = 0
        while one.axes[: count + 1] == two.axes[: count + 1] and count < len(one.axes):
            if self.prefix(one, count + 1) != self.prefix(two, count + 1):
                break
            count += 1
        return count


def subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every non-empty subset, in the order of `axes`."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)
