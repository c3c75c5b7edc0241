"""Prices of collectives that are merged into buckets: they share one start."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from cost_model.compute import ComputePrices
from cost_model.mesh import MeshSpec

__all__ = ["MERGED", "START_SHARE", "BucketedPrices", "Seconds", "copies_seconds"]

START_SHARE = 0.1
"""A share of a collective's time. A bucket is large enough if starting it takes less than this share."""

MERGED = ("all_gather", "all_reduce", "reduce_scatter")
"""The kinds that can share a buffer."""

_SIZES = tuple(2**k for k in range(8, 31))

Seconds = Callable[[str, tuple[str, ...], int], float]


class BucketedPrices:
    """`seconds` of one collective as a part of a full bucket.

    A bucket of `limit` bytes takes t = price(limit). A part of n < limit bytes is charged n / limit of t, which is
    less than price(n) because the parts share one start, and its copies into the bucket and out of it. A larger
    collective fills a bucket alone. Kinds that are not merged (`MERGED`) keep their price. The price leaves out
    that the last bucket of a phase is not full.
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
        """Bytes of a full bucket: starting it takes no more than `START_SHARE`.

        The start is what merging two collectives of a size saves, 2 seconds(n) - seconds(2 n). It is the median over
        the sizes at which it matters: the smallest measured sizes say little about larger ones, and sizes that take
        long for their bytes say nothing of the start.
        """
        if (kind, axes) not in self._limits:
            seconds = {nbytes: self._price(kind, axes, nbytes) for nbytes in _SIZES}
            saved = ((2 * seconds[n] - seconds[2 * n], seconds[n]) for n in _SIZES[:-1])
            start = median([s for s, one in saved if s >= START_SHARE * one] or [0.0])
            enough = (n for n in _SIZES if START_SHARE * seconds[n] >= start)
            self._limits[kind, axes] = next(enough, _SIZES[-1])
        return self._limits[kind, axes]


def copies_seconds(compute: ComputePrices, kind: str, ranks: int, nbytes: int, count: int) -> float:
    """Seconds to copy `count` tensors into a bucket of `nbytes` over `ranks` and, if they are gathered, out of it.
    Each copy reads and writes. One kernel fills the bucket and is not counted here; one kernel a tensor empties it."""
    if kind == "all_gather":
        return count * compute.launch_seconds + compute.memory_seconds(2 * nbytes + 2 * nbytes / ranks)
    return compute.memory_seconds(2 * nbytes)
