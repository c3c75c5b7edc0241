"""The least memory that any choice needs at a step: what proves that nothing fits."""

from __future__ import annotations

import time

import numpy as np

from .core import Budget, solve_graph
from .graph import Graph
from .problem import Array, Infeasible, Problem

__all__ = ["least_usage", "no_room", "several_rows"]

FULLEST = 8
"""Steps that are looked at, those where the nodes' least usages add up to most."""


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
    return sorted(range(len(least)), key=lambda row: (-least[row], row))[:FULLEST]


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
