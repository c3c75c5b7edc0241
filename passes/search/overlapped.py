"""Search where communication may hide behind computation: the exposed time of a phase is in the objective.

With C_p the computing and G_p the hideable communication of phase p, e the overlap efficiency of the
profile, and U all that cannot hide, a step takes

    T(x) = U + sum_p (C_p + G_p - e min(C_p, G_p))
         = max over m in [0,1]^P of  U + sum_p ((1 - e m_p) C_p + (1 - e (1 - m_p)) G_p)  =:  max_m L(x, m)

For a fixed m, L is a sum of node and edge costs, which `solve` minimises exactly. Every D(m) = min_x L(x, m) is a
lower bound of T, and the largest is found by cutting planes: each solution x_k bounds D from above by the
plane L(x_k, .), the next m is the highest point under all planes [Kelley 1960]. m = 0, computation takes
longer in every phase, comes first: if its solution computes longer indeed, it is optimal.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from passes.search.cost_kinds import CostKinds
from passes.search.problem import Problem, Solution
from passes.search.recombine import recombined
from passes.search.solve import solve

__all__ = ["solve_overlapped"]

ROUNDING = 1e-9
"""Relative gap that counts as none, as in `solve`."""
ENOUGH = 5e-4
"""Share of the cost by which the bound may still rise when more solving is not worth the wait. The gap that
stays is stated in the plan."""
ROUNDS = 8
"""Most problems solved."""


def solve_overlapped(
    problem: Problem, kinds: CostKinds, efficiency: float, *, time_limit: float = 60.0
) -> Solution:
    """The choice of least T (see above) within the memory limit; `Solution.cost` and `lower_bound` are of T.

    efficiency: in [0, 1]; at 0, or where nothing can hide, this is `solve`. Stops when the bound meets the best T
    or cannot rise by more than 5e-4 of it, or after about `time_limit` seconds. What is left of the gap is real: T is
    convex but choices are discrete. Raises Infeasible.
    """
    if efficiency == 0.0 or not any(kind >= 0 and kind % 2 for kind in kinds.edges):
        return solve(problem, time_limit=time_limit)
    search = _CuttingPlanes(problem, kinds, efficiency, time.monotonic() + time_limit)
    search.run()
    return search.solution()


class _CuttingPlanes:
    """The best choice and the best bound so far, and the planes L(x_k, m) = constant + slopes . m."""

    def __init__(self, problem: Problem, kinds: CostKinds, efficiency: float, deadline: float) -> None:
        self.problem = problem
        self.kinds = kinds
        self.efficiency = efficiency
        self.deadline = deadline
        self.choice: tuple[int, ...] = ()
        self.cost = np.inf
        self.bound = -np.inf
        self.bound_at = [0.0] * kinds.phases
        self.planes: list[tuple[float, list[float]]] = []

    def run(self) -> None:
        """Rounds until the bound meets the cost, is near enough to it, or cannot rise any more."""
        self._solve_at(self.bound_at)
        if self._gap() <= ROUNDING:
            return
        for _ in range(ROUNDS - 1):
            highest, m = self._highest()
            if highest <= self.bound + ENOUGH * self.cost or time.monotonic() >= self.deadline:
                return
            # With one plane the highest point is a corner: a point on the way says more.
            near = [a + (b - a) / 4 for a, b in zip(self.bound_at, m, strict=True)]
            self._solve_at(near if len(self.planes) == 1 else m)

    def solution(self) -> Solution:
        bound = min(self.bound, self.cost)
        gap = (self.cost - bound) / max(abs(self.cost), 1e-300)
        return Solution(self.choice, self.cost, bound, gap, "optimal" if gap <= ROUNDING else "feasible")

    def _gap(self) -> float:
        return (self.cost - self.bound) / max(abs(self.cost), 1e-300)

    def _solve_at(self, m: Sequence[float]) -> None:
        e = self.efficiency
        weights = [w for m_p in m for w in (1.0 - e * m_p, 1.0 - e * (1.0 - m_p))]
        left = max(self.deadline - time.monotonic(), 1.0)
        found = solve(self.kinds.weighted(self.problem, weights), time_limit=left, warm=self.choice or None)
        if found.lower_bound > self.bound:
            self.bound, self.bound_at = found.lower_bound, list(m)
        parts = self.kinds.parts(self.problem, found.choice)
        everything = parts.exposed + sum(parts.compute) + (1.0 - e) * sum(parts.hideable)
        slopes = [e * (g - c) for c, g in zip(parts.compute, parts.hideable, strict=True)]
        self.planes.append((everything, slopes))
        candidates = [found.choice]
        if self.choice:
            candidates.append(recombined(self.problem, self.kinds, e, self.choice, found.choice))
        for choice in candidates:
            seconds = self.kinds.parts(self.problem, choice).seconds(e)
            if seconds < self.cost:
                self.cost, self.choice = seconds, tuple(choice)

    def _highest(self) -> tuple[float, list[float]]:
        """max over m in [0,1]^P of min over the planes: maximise t with t <= constant + slopes . m."""
        phases = self.kinds.phases
        scale = max(abs(self.cost), 1e-300)  # HiGHS's tolerances are absolute
        rows = [[1.0, *(-s / scale for s in slopes)] for _, slopes in self.planes]
        limits = [constant / scale for constant, _ in self.planes]
        bounds = [(None, None), *[(0.0, 1.0)] * phases]
        result = linprog([-1.0, *[0.0] * phases], A_ub=rows, b_ub=limits, bounds=bounds, method="highs")
        assert result.success, result.message
        return float(result.x[0]) * scale, [float(v) for v in result.x[1:]]
