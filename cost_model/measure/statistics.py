"""From repeated times to the numbers of a profile: medians, spread, and times that never fall with size."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SampledCurve", "curve", "median", "monotone", "pooled_medians", "spread"]


@dataclass(frozen=True)
class SampledCurve:
    """Times by size.

    medians:  of the repetitions, as they came.
    spread:   interquartile range over median.
    seconds:  the medians made never falling, for a profile.
    """

    sizes: tuple[int, ...]
    medians: tuple[float, ...]
    spread: tuple[float, ...]
    seconds: tuple[float, ...]


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Interquartile range over median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def monotone(values: Sequence[float]) -> list[float]:
    """`pooled_medians` of single values.   [1, 3, 2, 5] -> [1, 2.5, 2.5, 5]"""
    return pooled_medians([[value] for value in values])


def pooled_medians(repeated: Sequence[Sequence[float]]) -> list[float]:
    """Medians of each group of values, never falling. Groups of a falling run are pooled, and get the median of all.

        [[1], [3, 3, 9], [2], [5]] -> [1, 3, 3, 5]

    A larger buffer that took less time is noise. The result is the never falling sequence nearest to all given
    values in the sum of distances; one wild value moves nothing.   [pool adjacent violators, in L1]
    """
    blocks: list[tuple[list[float], int]] = []  # values, groups
    for values in repeated:
        block, groups = list(values), 1
        while blocks and median(blocks[-1][0]) > median(block):
            before, count = blocks.pop()
            block, groups = before + block, count + groups
        blocks.append((block, groups))
    return [middle for block, groups in blocks for middle in [median(block)] * groups]


def curve(samples: dict[int, list[float]]) -> SampledCurve:
    """size -> repeated seconds."""
    sizes = tuple(sorted(samples))
    return SampledCurve(
        sizes,
        tuple(median(samples[size]) for size in sizes),
        tuple(round(spread(samples[size]), 4) for size in sizes),
        tuple(pooled_medians([samples[size] for size in sizes])),
    )
