"""Prices of collectives that are merged into buckets: they share one start."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from cost_model.compute import ComputePrices
from cost_model.mesh import MeshSpec

__all__ = ["MERGED", "START_SHARE", "BucketedPrices", "Seconds", "copies_seconds"]

START_SHARE = 0.1
"""Of a collective's time; a bucket at which starting it takes less is large enough."""

MERGED = ("all_gather", "all_reduce", "reduce_scatter")
"""The kinds that can share a buffer."""

_SIZES = tuple(2**k for k in range(8, 31))

Seconds = Callable[[str, tuple[str, ...], int], float]


class BucketedPrices:
    """`seconds` of one collective as a part of a full bucket.

    A bucket of `limit` bytes takes t = price(limit); n < limit of its bytes are charged n / limit of t, which
    is less than price(n) by their share of the start, and their copies into the bucket and out of it. Larger
    ones fill a bucket alone. Kinds that are not merged (`MERGED`) keep their price. What is rounded up in
    reality, the last bucket of a phase, is not here.
    """

    def __init__(self, price: Seconds, mesh: MeshSpec, compute: ComputePrices) -> None:
        self._price = price
        self._mesh = mesh
        self._compute = compute
        self._limits: dict[tuple[str, tuple[str, ...]], int] = {}

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        alone = self._price(kind, axes, nbytes)
        if kind not in MERGED:
            return alone
        limit = self.limit(kind, axes)
        if nbytes >= limit:
            return alone
        share = self._price(kind, axes, limit) * nbytes / limit
        copies = copies_seconds(self._compute, kind, self._mesh.size(*axes), nbytes, 1) if nbytes else 0.0
        return min(alone, share + copies)

    def limit(self, kind: str, axes: tuple[str, ...]) -> int:
        """Bytes of a full bucket: from there on starting takes no more than `START_SHARE`.

        Starting is what merging two of a size saves, 2 seconds(n) - seconds(2 n): the median of the sizes at which
        it matters, as the smallest measured sizes say little about larger ones, and those that take long for their
        bytes nothing of starting.
        """
        if (kind, axes) not in self._limits:
            seconds = {nbytes: self._price(kind, axes, nbytes) for nbytes in _SIZES}
            saved = ((2 * seconds[n] - seconds[2 * n], seconds[n]) for n in _SIZES[:-1])
            start = median([s for s, one in saved if s >= START_SHARE * one] or [0.0])
            enough = (n for n in _SIZES if START_SHARE * seconds[n] >= start)
            self._limits[kind, axes] = next(enough, _SIZES[-1])
        return self._limits[kind, axes]


def copies_seconds(compute: ComputePrices, kind: str, ranks: int, nbytes: int, count: int) -> float:
    """Of `count` tensors in a bucket of `nbytes` over `ranks`, into it and, of what is gathered, out of it: each
    copy reads and writes. Into it is one kernel for the bucket, not counted here; out of it one a tensor."""
    if kind == "all_gather":
        return count * compute.launch_seconds + compute.memory_seconds(2 * nbytes + 2 * nbytes / ranks)
    return compute.memory_seconds(2 * nbytes)
