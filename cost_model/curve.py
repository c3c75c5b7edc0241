"""A measured curve: linear in log x and log y between its points, straight lines outside."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["Curve"]


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
