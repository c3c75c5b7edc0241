"""Lower bounds as a function of prices: every choice is a plane, and the best prices lie where the planes are highest.

A choice x with exposed seconds, computing C_p, hideable communication G_p and memory use[t] gives, for shares m in
[0,1] and prices v >= 0 (seconds for using the limit once more),

    L(x; m, v) = exposed + sum_p ((1 - e m_p) C_p + (1 - e (1 - m_p)) G_p) + sum_t v_t (use[t] / limit - 1)

min over all x of L is a lower bound of any choice that fits; the planes of some x bound that from above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import linprog

from passes.schedule.hiding import StepParts
from passes.solver.problem import Array, Problem

__all__ = ["Plane", "Point", "charged", "highest_point"]


@dataclass(frozen=True)
class Point:
    """shares: m per phase. prices: v by memory row (position in `Problem.steps`); rows without one cost nothing."""

    shares: tuple[float, ...]
    prices: Mapping[int, float] = field(default_factory=dict[int, float])

    def towards(self, other: Point, share: float) -> Point:
        """The point at `share` of the way to `other`."""
        shares = tuple(a + share * (b - a) for a, b in zip(self.shares, other.shares, strict=True))
        prices = {
            row: a + share * (other.prices.get(row, 0.0) - a)
            for row in sorted({*self.prices, *other.prices})
            for a in (self.prices.get(row, 0.0),)
        }
        return Point(shares, prices)

    def weights(self, efficiency: float) -> list[float]:
        """Per cost kind of `CostKinds`, EXPOSED left out."""
        return [w for m in self.shares for w in (1.0 - efficiency * m, 1.0 - efficiency * (1.0 - m))]


@dataclass(frozen=True, eq=False)
class Plane:
    """L of one choice: constant + slopes . m + sum_t v_t over[t]. over: use / limit - 1 by row; empty: no limit."""

    constant: float
    slopes: tuple[float, ...]
    over: Array

    @staticmethod
    def of(parts: StepParts, efficiency: float, over: Array) -> Plane:
        everything = parts.exposed + sum(parts.compute) + (1.0 - efficiency) * sum(parts.hideable)
        pairs = zip(parts.compute, parts.hideable, strict=True)
        return Plane(everything, tuple(efficiency * (g - c) for c, g in pairs), over)


def highest_point(planes: Sequence[Plane], rows: Sequence[int], cap: float) -> tuple[float, Point]:
    """max over m in [0,1]^P and v in [0, cap]^rows of the least plane, and where it is."""
    scale = max(max(abs(plane.constant) for plane in planes), 1e-300)  # HiGHS's tolerances are absolute
    slopes = [
        [*(s / scale for s in plane.slopes), *(float(plane.over[row]) for row in rows)] for plane in planes
    ]
    phases = len(planes[0].slopes)
    result = linprog(
        [-1.0, *[0.0] * (phases + len(rows))],
        A_ub=[[1.0, *(-s for s in row)] for row in slopes],  # t <= constant + slopes . (m, v)
        b_ub=[plane.constant / scale for plane in planes],
        bounds=[(None, None), *[(0.0, 1.0)] * phases, *[(0.0, cap / scale)] * len(rows)],
        method="highs",
    )
    assert result.success, result.message
    values = [float(v) for v in result.x]
    shares, prices = values[1 : 1 + phases], values[1 + phases :]
    named = {row: v * scale for row, v in zip(rows, prices, strict=True) if v > 0}
    return values[0] * scale, Point(tuple(shares), named)


def charged(problem: Problem, prices: Mapping[int, float]) -> Problem:
    """`problem` without its limit, but with sum_t v_t use[t] / limit in its node costs; one array per
    (cost array, usage array, price), so that copies of a layer stay copies."""
    free = replace(problem, limit=None)
    if not prices:
        return free
    assert problem.limit is not None
    slope = np.zeros(len(problem.steps) + 1)
    for row, price in prices.items():
        slope[row + 1] += price / problem.limit
    before = np.cumsum(slope)  # of the prices of the rows before each
    made: dict[tuple[int, int, float], Array] = {}
    costs = list(problem.node_costs)
    for node, (first, last) in problem.live.items():
        price = float(before[last] - before[first])
        if price <= 0.0:
            continue
        key = id(problem.node_costs[node]), id(problem.usages[node]), price
        if key not in made:
            made[key] = costs[node] + price * np.asarray(problem.usages[node], dtype=np.float64)
        costs[node] = made[key]
    return replace(free, node_costs=tuple(costs))
