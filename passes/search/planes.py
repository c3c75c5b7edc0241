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

from passes.solver.problem import Array, Problem


@dataclass(frozen=True)
class Point:
    """shares: m, all phases' paths one behind the other. prices: v by memory row (position in `Problem.steps`); rows
    without one cost nothing."""

    shares: tuple[float, ...]
    prices: Mapping[int, float] = field(default_factory=dict[int, float])

    @staticmethod
    def first(paths: Sequence[Array]) -> Point:
        """All weight on the first path of each phase."""
        return Point(tuple(float(place == 0) for rows in paths for place in range(len(rows))))

    def towards(self, other: Point, share: float) -> Point:
        """The point at `share` of the way to `other`."""
        shares = tuple(a + share * (b - a) for a, b in zip(self.shares, other.shares, strict=True))
        prices = {
            row: a + share * (other.prices.get(row, 0.0) - a)
            for row in sorted({*self.prices, *other.prices})
            for a in (self.prices.get(row, 0.0),)
        }
        return Point(shares, prices)

    def weights(self, paths: Sequence[Array]) -> list[float]:
        """Per kind of `CostKinds`."""
        moved = np.asarray(self.shares) @ np.concatenate(paths)
        return [round(1.0 + float(w), 12) for w in moved]


@dataclass(frozen=True, eq=False)
class Plane:
    """L of one choice: constant + slopes . m + sum_t v_t over[t]. over: use / limit - 1 by row; empty: no limit."""

    constant: float
    slopes: tuple[float, ...]
    over: Array

    @staticmethod
    def of(totals: Array, paths: Sequence[Array], over: Array) -> Plane:
        slopes = np.concatenate(paths) @ totals
        return Plane(float(totals.sum()), tuple(float(slope) for slope in slopes), over)


def highest_point(
    planes: Sequence[Plane], phases: Sequence[int], rows: Sequence[int], cap: float
) -> tuple[float, Point] | None:
    """max over shares m and v in [0, cap]^rows of the least plane, and where it is. phases: paths of each.

    None if HiGHS cannot tell: prices of memory that have risen far make planes steeper than its tolerances allow."""
    scale = max(max(abs(plane.constant) for plane in planes), 1e-300)  # HiGHS's tolerances are absolute
    slopes = [
        [*(s / scale for s in plane.slopes), *(float(plane.over[row]) for row in rows)] for plane in planes
    ]
    paths = len(planes[0].slopes)
    owner = np.repeat(np.arange(len(phases)), phases)
    whole = [[0.0, *(float(o == phase) for o in owner), *[0.0] * len(rows)] for phase in range(len(phases))]
    from scipy.optimize import linprog

    result = linprog(
        [-1.0, *[0.0] * (paths + len(rows))],
        A_ub=[[1.0, *(-s for s in row)] for row in slopes],  # t <= constant + slopes . (m, v)
        b_ub=[plane.constant / scale for plane in planes],
        A_eq=whole,
        b_eq=[1.0] * len(phases),
        bounds=[(None, None), *[(0.0, 1.0)] * paths, *[(0.0, cap / scale)] * len(rows)],
        method="highs",
    )
    if not result.success:
        return None
    values = [float(v) for v in result.x]
    shares, prices = values[1 : 1 + paths], values[1 + paths :]
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
