"""Measured curves: their medians and spread, made never falling, and interpolated."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
    """`pooled` of single values.   [1, 3, 2, 5] -> [1, 2.5, 2.5, 5]"""
    return pooled([[value] for value in values])


def pooled(
    repeated: Sequence[Sequence[float]], middle: Callable[[Sequence[float]], float] = median
) -> list[float]:
    """Middles of each group of values, never falling. Groups of a falling run are pooled, and get the middle of all.

        [[1], [3, 3, 9], [2], [5]] -> [1, 3, 3, 5]

    A larger buffer that took less time is noise. With medians the result is the never falling sequence nearest to all
    given values in the sum of distances, where one wild value moves nothing; with means in the sum of their squares.
    [pool adjacent violators: Barlow et al. 1972]
    """
    blocks: list[tuple[list[float], int]] = []  # values, groups
    for values in repeated:
        block, groups = list(values), 1
        while blocks and middle(blocks[-1][0]) > middle(block):
            before, count = blocks.pop()
            block, groups = before + block, count + groups
        blocks.append((block, groups))
    return [one for block, groups in blocks for one in [middle(block)] * groups]


def curve(samples: dict[int, list[float]]) -> SampledCurve:
    """size -> repeated seconds."""
    sizes = tuple(sorted(samples))
    return SampledCurve(
        sizes,
        tuple(median(samples[size]) for size in sizes),
        tuple(round(spread(samples[size]), 4) for size in sizes),
        tuple(pooled([samples[size] for size in sizes])),
    )


class Curve:
    """y(x) through measured points; `curve(x)` evaluates it.

    Between two points log y is linear in log x, which is exact for a power law and keeps y / x
    between its values at the two points: an interpolated price cannot beat a bandwidth that both
    measurements respect. Outside, y continues as a straight line with the given slopes:

        x < xs[0]:   y = ys[0] - slope_below * (xs[0] - x)
        x > xs[-1]:  y = ys[-1] + slope_above * (x - xs[-1])

    `xs` positive and increasing, `ys` positive and not decreasing, 0 <= slope_below <= ys[0] / xs[0],
    slope_above >= 0. Then y is monotone and not negative for x >= 0.
    """

    __slots__ = ("_exponents", "_slope_above", "_slope_below", "_xs", "_ys")

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], slope_below: float, slope_above: float
    ) -> None:
        assert len(xs) == len(ys) >= 1, (xs, ys)
        assert 0.0 <= slope_below <= ys[0] / xs[0] * (1 + 1e-12), "the line below would become negative"
        assert slope_above >= 0.0, slope_above
        self._xs = tuple(float(x) for x in xs)
        self._ys = tuple(float(y) for y in ys)
        self._slope_below = slope_below
        self._slope_above = slope_above
        self._exponents = tuple(
            math.log(self._ys[i + 1] / self._ys[i]) / math.log(self._xs[i + 1] / self._xs[i])
            for i in range(len(self._xs) - 1)
        )

    def __call__(self, x: float) -> float:
        xs = self._xs
        if x < xs[0]:
            return max(0.0, self._ys[0] - self._slope_below * (xs[0] - x))
        if x >= xs[-1]:
            return self._ys[-1] + self._slope_above * (x - xs[-1])
        i = bisect_right(xs, x) - 1
        return self._ys[i] * (x / xs[i]) ** self._exponents[i]
