"""The search's front door: `solve`, and why no choice is possible: nodes that contradict each other, or the least
memory that any choice needs at a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .core import Budget, cost_scale, solve_graph, solve_presolved
from .graph import DeadEnd, Graph
from .memory_rows import MemorySearch
from .presolve import presolve, propagate
from .problem import Array, Infeasible, Problem, Solution, Tables

ROUNDING = 1e-9
"""Relative gap that counts as none: what sums of float64 costs and HiGHS's tolerances leave open."""


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    relative_gap: float = 0.0,
    warm: Sequence[int] | None = None,
    enough: float = 0.0,
) -> Solution:
    """The choice of least cost within the memory limit, with a proven lower bound.

    Stops when (cost - bound) / |cost| <= relative_gap (1e-9 at least), or after about `time_limit` seconds with the
    best choice so far. warm: a choice from elsewhere (of a similar problem); where it is possible and fits, only better
    ones are looked for. enough: a gap within which what relaxations leave is not searched by an integer program of all
    of it, but where that is small. Deterministic, as long as the time limit does not end it. Raises Infeasible.
    """
    # Share of the time limit, and seconds at most, kept for what cannot be interrupted.
    deadline = time.monotonic() + time_limit - min(10.0, 0.05 * time_limit)
    relative = max(relative_gap, ROUNDING)
    known = None if warm is None else [int(a) for a in warm]
    if known is not None and not (problem.fits(known) and np.isfinite(problem.cost(known))):
        known = None
    # Entries of a problem's tables up to which they are used and filled further: 64 MB.
    shared = problem.tables.entries <= 8_000_000
    base = Graph.of(problem, problem.tables if shared else Tables())
    prices: dict[int, float] = {}
    try:
        choice, bound = _search(problem, base, (relative, enough), deadline, known, prices)
    except DeadEnd as dead:
        raise _reason(problem, base, dead, deadline) from None
    if choice is None and known is None:
        raise no_room(problem, base, deadline) or Infeasible("time")
    best = min((c for c in (choice, known) if c is not None), key=problem.cost)
    cost = problem.cost(best)
    assert np.isfinite(cost)
    bound = min(bound, cost)
    gap = 0.0 if bound == cost else (cost - bound) / max(abs(cost), 1e-300)
    status = "optimal" if gap <= relative * (1 + 1e-6) else "feasible"
    return Solution(tuple(best), cost, bound, gap, status, prices)


def _search(
    problem: Problem,
    base: Graph,
    gaps: tuple[float, float],
    deadline: float,
    known: list[int] | None,
    prices: dict[int, float],
) -> tuple[list[int] | None, float]:
    """The best choice found (None: none) and a bound; those of memory go into `prices`. gaps: at which it stops, and
    which are enough. Raises DeadEnd if nothing is possible."""
    now = time.monotonic()
    graph = base.copy()
    if problem.limit is not None:
        graph.add_rows(problem)
    # Shares of the time limit after which the expensive reductions end, and the cheap ones.
    presolve(graph, now + 0.4 * (deadline - now), now + 0.7 * (deadline - now))
    scale, messages = cost_scale(graph, deadline)
    budget = Budget(deadline, *(gap * scale for gap in gaps))
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


SMALL = 60
"""Nodes of a set that is made minimal by solving, where arc consistency would do."""
_Test = Callable[[Graph, Sequence[int]], bool]


def contradiction(base: Graph, suspect: int) -> list[int]:
    """Nodes of `base` (unreduced) that have no joint choice, those nearest to the contradiction first.

    Grows a ball around `suspect` until it has none, then drops nodes it does not need: every proper subset of the
    answer has a choice, unless it is large.
    """
    possible: _Test = _possible
    try:
        propagate(base.copy())
    except DeadEnd as dead:  # which arc consistency sees: it is enough, and fast, to ask only that
        possible, suspect = _consistent, dead.node
    ball = _ball(base, suspect, possible)
    # Nodes of the largest set that is made minimal; a larger one is returned as it is.
    if len(ball) > 400:
        return ball
    needed = _shrink(base, [], ball, possible)
    if possible is _consistent and len(needed) <= SMALL:  # a part of it may do, by reasons it does not see
        needed = _shrink(base, [], needed, _possible)
    return [node for node in ball if node in set(needed)]


def _ball(base: Graph, center: int, possible: _Test) -> list[int]:
    """Nodes by distance from `center`, as few layers as have no joint choice; the whole component at worst."""
    ball, layer, seen, tried = [center], [center], {center}, 0
    while layer:
        if len(ball) >= 1.5 * tried:
            if not possible(base, ball):
                return ball
            tried = len(ball)
        layer = sorted({other for node in layer for other in base.adjacent[node]} - seen)
        seen.update(layer)
        ball += layer
    return ball


def _shrink(
    base: Graph, kept: list[int], nodes: list[int], possible: _Test, grown: bool = False
) -> list[int]:
    """The part of `nodes` that contradicts `kept`, irreducible. `grown`: `kept` may be enough by now.

    [Junker, QuickXplain, 2004.]
    """
    if grown and not possible(base, kept):
        return []
    if len(nodes) == 1:
        return nodes
    first, second = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    of_second = _shrink(base, kept + first, second, possible, grown=True)
    of_first = _shrink(base, kept + of_second, first, possible, grown=bool(of_second))
    return of_first + of_second


def _induced(base: Graph, nodes: Sequence[int]) -> Graph:
    kept = set(nodes)
    return Graph(
        base.tables,
        {node: base.cost[node] for node in sorted(kept)},
        {node: {k: m for k, m in base.adjacent[node].items() if k in kept} for node in sorted(kept)},
    )


def _consistent(base: Graph, nodes: Sequence[int]) -> bool:
    """Arc consistency leaves every node a strategy."""
    try:
        propagate(_induced(base, nodes))
    except DeadEnd:
        return False
    return True


def _possible(base: Graph, nodes: Sequence[int]) -> bool:
    """The nodes have a joint choice, or none could be excluded in time."""
    graph = _induced(base, nodes)
    try:
        presolve(graph)
        # For each question whether a set has a choice.
        solve_presolved(graph, Budget(time.monotonic() + 20.0, float("inf")))
    except DeadEnd:
        return False
    except Infeasible:
        pass
    return True


def no_room(problem: Problem, base: Graph, deadline: float) -> Infeasible | None:
    """That no choice fits at one of the fullest steps, if that is so. Looks at the fullest alone after `deadline`."""
    assert problem.limit is not None
    for looked, row in enumerate(_fullest(problem)):
        if looked and time.monotonic() > deadline:
            return None
        try:
            usage, choice = least_usage(problem, base, row, deadline)
        except Infeasible:  # time
            return None
        if usage > problem.limit:
            nodes = live_nodes(problem, row, choice)
            return Infeasible("memory", nodes, usage, int(problem.steps[row]))
    return None


def several_rows(problem: Problem, base: Graph, deadline: float) -> Infeasible:
    """That no choice fits, as several steps together prove."""
    assert problem.limit is not None
    row = _fullest(problem)[0]
    nodes = live_nodes(problem, row, least_usage(problem, base, row, deadline)[1])
    return Infeasible("memory", nodes, problem.limit, int(problem.steps[row]))


def _fullest(problem: Problem) -> list[int]:
    least = problem.least_profile()
    # Steps that are looked at, those where the nodes' least usages add up to most.
    return sorted(range(len(least)), key=lambda row: (-least[row], row))[:8]


def least_usage(problem: Problem, base: Graph, row: int, deadline: float) -> tuple[float, list[int]]:
    """A lower bound on the usage at `row` of any choice, and a choice that uses about as little."""
    count = len(problem.node_costs)
    cost: list[Array] = []
    for node in range(count):
        first, last = problem.live.get(node, (0, 0))
        used = np.asarray(problem.usages[node], dtype=np.float64) if first <= row < last else 0.0
        cost.append(np.where(np.isfinite(problem.node_costs[node]), used, np.inf))
    graph = base.copy()
    zeros: dict[int, Array] = {}
    for node in range(count):
        graph.cost[node] = graph.tables.intern(cost[node])
        for other, matrix in base.adjacent[node].items():
            if node < other:
                if id(matrix) not in zeros:
                    zeros[id(matrix)] = graph.tables.intern(np.where(np.isfinite(matrix), 0.0, np.inf))
                graph.set_edge(node, other, zeros[id(matrix)])
    assert problem.limit is not None
    found = solve_graph(graph, Budget(deadline, 1e-9 * problem.limit))
    return found.bound, [found.choice[node] for node in range(count)]


def live_nodes(problem: Problem, row: int, choice: list[int]) -> list[int]:
    """Nodes live at `row` that use something there in `choice`, largest usage first."""
    live = [node for node, (first, last) in problem.live.items() if first <= row < last]
    used = {node: float(problem.usages[node][choice[node]]) for node in live}
    return sorted((node for node in live if used[node] > 0), key=lambda node: (-used[node], node))
