"""Prices of collectives that are merged into buckets: they share one start."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MERGED", "START_SHARE", "BucketedPrices"]

START_SHARE = 0.1
"""Of a collective's time; a bucket at which starting it takes less is large enough."""

MERGED = ("all_gather", "all_reduce", "reduce_scatter")
"""The kinds that can share a buffer."""

Seconds = Callable[[str, tuple[str, ...], int], float]


class BucketedPrices:
    """`seconds` of one collective as a part of a full bucket.

    A bucket of `limit` bytes takes t = price(limit); n < limit of its bytes are charged n / limit of t, which
    is less than price(n) by their share of the start. Larger ones fill a bucket alone. Kinds that are not
    merged (`MERGED`) keep their price. What is rounded up in reality, the last bucket of a phase, is not here.
    """

    def __init__(self, price: Seconds) -> None:
        self._price = price
        self._limits: dict[tuple[str, tuple[str, ...]], int] = {}

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        alone = self._price(kind, axes, nbytes)
        if kind not in MERGED:
            return alone
        limit = self.limit(kind, axes)
        return alone if nbytes >= limit else min(alone, self._price(kind, axes, limit) * nbytes / limit)

    def limit(self, kind: str, axes: tuple[str, ...]) -> int:
        """Bytes of a full bucket: from there on starting takes no more than `START_SHARE`, to a factor of two."""
        if (kind, axes) not in self._limits:
            nbytes, start = 1, self._price(kind, axes, 1)
            while nbytes < 2**40 and start > START_SHARE * self._price(kind, axes, nbytes):
                nbytes *= 2
            self._limits[kind, axes] = nbytes
        return self._limits[kind, axes]
