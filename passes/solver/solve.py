"""The search's front door: `solve`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from .core import Budget, cost_scale, solve_presolved
from .explain_infeasible import contradiction, no_room, several_rows
from .graph import DeadEnd, Graph
from .memory_rows import MemorySearch
from .presolve import presolve
from .problem import Infeasible, Problem, Solution, Tables

ROUNDING = 1e-9
"""Relative gap that counts as none: what sums of float64 costs and HiGHS's tolerances leave open."""


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    relative_gap: float = 0.0,
    warm: Sequence[int] | None = None,
) -> Solution:
    """The choice of least cost within the memory limit, with a proven lower bound.

    Stops when (cost - bound) / |cost| <= relative_gap (1e-9 at least), or after about `time_limit` seconds with the
    best choice so far. warm: a choice from elsewhere (of a similar problem); where it is possible and fits, only better
    ones are looked for. Deterministic, as long as the time limit does not end it. Raises Infeasible.
    """
    # Share of the time limit, and seconds at most, kept for what cannot be interrupted.
    deadline = time.monotonic() + time_limit - min(10.0, 0.05 * time_limit)
    relative = max(relative_gap, ROUNDING)
    known = _known(problem, warm)
    # Entries of a problem's tables up to which they are used and filled further: 64 MB.
    shared = problem.tables.entries <= 8_000_000
    base = Graph.of(problem, problem.tables if shared else Tables())
    prices: dict[int, float] = {}
    try:
        choice, bound = _search(problem, base, relative, deadline, known, prices)
    except DeadEnd as dead:
        raise _reason(problem, base, dead, deadline) from None
    if choice is None and known is None:
        raise no_room(problem, base, deadline) or Infeasible("time")
    best = min((c for c in (choice, known) if c is not None), key=problem.cost)
    return _solution(problem, best, bound, relative, prices)


def _search(
    problem: Problem,
    base: Graph,
    relative: float,
    deadline: float,
    known: list[int] | None,
    prices: dict[int, float],
) -> tuple[list[int] | None, float]:
    """The best choice found (None: none) and a bound; those of memory go into `prices`. Raises DeadEnd if nothing is
    possible."""
    now = time.monotonic()
    graph = base.copy()
    if problem.limit is not None:
        graph.add_rows(problem)
    # Shares of the time limit after which the expensive reductions end, and the cheap ones.
    presolve(graph, now + 0.4 * (deadline - now), now + 0.7 * (deadline - now))
    scale, messages = cost_scale(graph, deadline)
    budget = Budget(deadline, relative * scale)
    warm = None if known is None else graph.reduced(dict(enumerate(known)))
    if graph.use:
        search = MemorySearch(graph, budget, warm)
        search.solve()
        best, bound = search.best, search.bound
        prices.update(search.prices)
    else:
        found = solve_presolved(graph, budget, warm, messages)
        return [found.choice[node] for node in range(len(problem.node_costs))], found.bound
    if best is None:
        return None, bound
    full = graph.expand(best)
    return [full[node] for node in range(len(problem.node_costs))], bound


def _known(problem: Problem, warm: Sequence[int] | None) -> list[int] | None:
    """The warm start, if it is a choice that fits."""
    if warm is None:
        return None
    choice = [int(a) for a in warm]
    return choice if problem.fits(choice) and np.isfinite(problem.cost(choice)) else None


def _reason(problem: Problem, base: Graph, dead: DeadEnd, deadline: float) -> Infeasible:
    """Why no choice is possible."""
    if problem.limit is not None:
        graph = base.copy()
        try:
            presolve(graph, deadline)
            solve_presolved(graph, Budget(deadline, float("inf")))
        except Infeasible as out_of_time:
            return out_of_time
        except DeadEnd as without_limit:
            dead = without_limit
        else:
            return no_room(problem, base, deadline) or several_rows(problem, base, deadline)
    return Infeasible("edges", contradiction(base, dead.node))


def _solution(
    problem: Problem, choice: list[int], bound: float, relative: float, prices: dict[int, float]
) -> Solution:
    cost = problem.cost(choice)
    assert np.isfinite(cost)
    bound = min(bound, cost)
    gap = 0.0 if bound == cost else (cost - bound) / max(abs(cost), 1e-300)
    closed = gap <= relative * (1 + 1e-6)
    return Solution(tuple(choice), cost, bound, gap, "optimal" if closed else "feasible", prices)


def mixed(problem: Problem, choices: Sequence[Sequence[int]], seconds: float) -> tuple[int, ...] | None:
    """The choice of least `problem.cost` that takes, at every node, a strategy that some of `choices` takes.

    Searches for about `seconds` at most; None if no mix was found that fits.
    """
    keep = [sorted(set(strategies)) for strategies in zip(*choices, strict=True)]
    small = restricted(problem, dict(enumerate(keep)))
    positions = [[k.index(a) for k, a in zip(keep, choice, strict=True)] for choice in choices]
    fitting = [p for p in positions if small.fits(p)]
    warm = min(fitting, key=small.cost, default=None)
    try:
        # Relative gap at which the mix is good enough: layers are discrete, so it seldom vanishes.
        found = solve(small, time_limit=seconds, relative_gap=1e-4, warm=warm)
    except Infeasible:
        return None
    return tuple(k[a] for k, a in zip(keep, found.choice, strict=True))


def restricted(problem: Problem, allowed: Mapping[int, Sequence[int]]) -> Problem:
    """`problem` with some strategies only: per node the ones kept, nodes not named keep all. Arrays that are the same
    part of the same are one: equal layers go on sharing theirs."""
    kept = {node: tuple(places) for node, places in allowed.items()}
    known: dict[tuple[object, ...], np.ndarray] = {}

    def part(values: np.ndarray, node: int, other: int | None = None) -> np.ndarray:
        rows, columns = kept.get(node), None if other is None else kept.get(other)
        if rows is None and columns is None:
            return values
        mark = (id(values), rows, columns)
        if mark not in known:
            some = values if rows is None else values[list(rows)]
            known[mark] = some if columns is None else some[:, list(columns)]
        return known[mark]

    return replace(
        problem,
        node_costs=tuple(part(costs, node) for node, costs in enumerate(problem.node_costs)),
        edge_costs=tuple(
            part(costs, *edge) for edge, costs in zip(problem.edges, problem.edge_costs, strict=True)
        ),
        usages=tuple(part(usages, node) for node, usages in enumerate(problem.usages)),
    )
