"""The search's front door: `solve`."""

from __future__ import annotations

import time

import numpy as np

from .core import Budget, Found, cost_scale, solve_presolved
from .explain import contradiction
from .graph import DeadEnd, Graph
from .memory import MemorySearch
from .presolve import presolve
from .problem import Infeasible, Problem, Solution
from .tables import Tables

__all__ = ["solve"]

ROUNDING = 1e-9
"""Relative gap that counts as none: what sums of float64 costs and HiGHS's tolerances leave open."""
UNLIMITED_SHARE = 0.4
"""Share of the time for the search without memory rows, where there is a limit."""


def solve(problem: Problem, *, time_limit: float = 60.0, relative_gap: float = 0.0) -> Solution:
    """The choice of least cost within the memory limit, with a proven lower bound.

    Stops when (cost - bound) / |cost| <= relative_gap (1e-9 at least), or after about `time_limit` seconds with the
    best choice so far. Deterministic, as long as the time limit does not end it. Raises Infeasible.
    """
    start = time.monotonic()
    deadline = start + time_limit
    relative = max(relative_gap, ROUNDING)
    base = Graph.of(problem, Tables())
    share = 1.0 if problem.limit is None else UNLIMITED_SHARE
    try:
        found, scale = _solve_unlimited(base, relative, start + share * time_limit)
    except DeadEnd as dead:
        raise Infeasible("edges", contradiction(base, dead.node)) from None
    choice = [found.choice[node] for node in range(len(problem.node_costs))]
    if problem.limit is None or problem.peak(choice)[0] <= problem.limit:
        return _solution(problem, choice, found.bound, relative)
    search = MemorySearch(problem, base, choice, found.bound, Budget(deadline, relative * scale))
    search.solve()
    assert search.best is not None
    return _solution(problem, search.best, search.bound, relative)


def _solve_unlimited(base: Graph, relative: float, deadline: float) -> tuple[Found, float]:
    graph = base.copy()
    presolve(graph)
    scale = cost_scale(graph)
    return solve_presolved(graph, Budget(deadline, relative * scale)), scale


def _solution(problem: Problem, choice: list[int], bound: float, relative: float) -> Solution:
    cost = problem.cost(choice)
    assert np.isfinite(cost)
    bound = min(bound, cost)
    gap = 0.0 if bound == cost else (cost - bound) / max(abs(cost), 1e-300)
    closed = gap <= relative * (1 + 1e-6)
    return Solution(tuple(choice), cost, bound, gap, "optimal" if closed else "feasible")
