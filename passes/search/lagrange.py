"""Prices for memory: the best bound from moving memory rows into the node costs.

For prices p[t] >= 0 per byte at step t, least (cost + sum_t p[t] * (usage[t] - limit)) bounds every choice within the
limit, and is found without memory rows. The prices are improved by cutting planes in a box around the best ones: each
choice found gives a plane over all prices, so that rows join as choices violate them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from .graph import Graph
from .problem import Array, Problem

__all__ = ["Prices", "priced", "violated_rows"]

START, GROWTH, SHRINK = 1e-2, 8.0, 0.7
"""The first prices make the memory above the limit cost this share of the rest. The box of prices grows by the one
factor while its edge is best, and shrinks by the other when a try is worse than its center."""


def violated_rows(problem: Problem, profile: Array, most: int) -> list[int]:
    """Rows (positions in `problem.steps`) above the limit: the top of each stretch, the `most` largest."""
    assert problem.limit is not None
    over = profile - problem.limit
    outside = np.flatnonzero(np.diff(np.concatenate([[False], over > 0, [False]]).astype(np.int8)))
    tops = [first + int(np.argmax(over[first:last])) for first, last in outside.reshape(-1, 2)]
    return sorted(sorted(tops, key=lambda row: (-over[row], row))[:most])


def priced(graph: Graph, prices: Mapping[int, float]) -> Graph:
    """`graph` with its memory rows moved into its costs: less or equal for every choice that fits. No trail."""
    moved = graph.copy()
    moved.constant = graph.constant - sum(prices.get(row, 0.0) * slack for row, slack in graph.slack.items())
    for node, rows in graph.use.items():
        extra = sum((prices.get(row, 0.0) * usage for row, usage in rows.items()), np.zeros(1))
        if extra.any():
            moved.add_cost(node, extra)
    moved.use.clear()
    moved.slack.clear()
    return moved


@dataclass(frozen=True)
class _Plane:
    """One choice: its cost, and what it uses above the limit at every row."""

    cost: float
    over: Array


class Prices:
    """Cutting planes for the concave function prices -> bound."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.planes: list[_Plane] = []
        self.center: dict[int, float] = {}
        self.best = -float("inf")
        self._radius = 0.0

    def add(self, prices: dict[int, float], cost: float, profile: Array) -> None:
        """The choice that the search answered at `prices`, by its cost and usage profile."""
        assert self.problem.limit is not None
        over = profile - self.problem.limit
        if not self.planes:
            self._radius = START * max(abs(cost), 1e-12) / max(float(over.max()), 1e-300)
        self.planes.append(_Plane(cost, over))
        for row in violated_rows(self.problem, profile, 8):
            self.center.setdefault(row, 0.0)
        value = cost + sum(price * float(over[row]) for row, price in prices.items())
        if value > self.best:
            on_edge = any(abs(p - self.center.get(t, 0.0)) > 0.99 * self._radius for t, p in prices.items())
            self._radius *= GROWTH if on_edge else 1.0
            self.best, self.center = value, {row: prices.get(row, 0.0) for row in self.center}
        elif len(self.center) > 1:  # with one row the planes alone close in on the best price
            self._radius *= SHRINK

    def propose(self) -> tuple[dict[int, float], float]:
        """The prices to try next, and the most that the bound could be there."""
        rows = sorted(self.center)
        unit = max(self._radius, 1e-300)
        over = np.array([plane.over[rows] for plane in self.planes]) * unit
        cost = np.array([plane.cost for plane in self.planes])
        scale = max(1e-300, float(np.abs(cost).max()))
        middle = np.array([self.center[row] for row in rows]) / unit
        answer = linprog(
            np.concatenate([np.zeros(len(rows)), [-1.0]]),
            A_ub=np.hstack([-over / scale, np.ones((len(cost), 1))]),
            b_ub=cost / scale,
            bounds=[(max(0.0, m - 1.0), m + 1.0) for m in middle] + [(None, None)],
        )
        if answer.x is None:
            return dict(self.center), self.best
        prices = {row: float(x) * unit for row, x in zip(rows, answer.x[:-1], strict=True)}
        return prices, float(answer.x[-1]) * scale
