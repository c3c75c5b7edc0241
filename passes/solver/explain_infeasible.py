"""Why no choice is possible: nodes that contradict each other, or the least memory that any choice needs at a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from .core import Budget, solve_graph, solve_presolved
from .graph import DeadEnd, Graph
from .presolve import presolve, propagate
from .problem import Array, Infeasible, Problem

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
    except (
        DeadEnd
    ) as dead:  # arc consistency sees the contradiction: it is enough, and fast, to ask only that
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
        return True
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
