"""From repeated times to the numbers of a profile: medians, spread, and times that never fall with size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Curve", "curve", "median", "monotone", "spread"]


@dataclass(frozen=True)
class Curve:
    """Times by size, ready for a profile: sizes increasing, seconds not decreasing, spread of each."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...]


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Interquartile range over median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def monotone(values: Sequence[float]) -> list[float]:
    """The never falling values nearest to these in the sum of squares: falling runs become their mean.

        [1, 3, 2, 5] -> [1, 2.5, 2.5, 5]

    A larger buffer that took less time is noise: the truth lies between the two. [pool adjacent violators]
    """
    blocks: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, length = value, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        blocks.append((mean, length))
    return [mean for mean, length in blocks for _ in range(length)]


def curve(samples: dict[int, list[float]]) -> Curve:
    """size -> repeated seconds, as a curve of medians."""
    sizes = tuple(sorted(samples))
    seconds = monotone([median(samples[size]) for size in sizes])
    return Curve(sizes, tuple(seconds), tuple(round(spread(samples[size]), 4) for size in sizes))
