"""Of choices that cost the same, one that uses less memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from passes.solver.problem import Array, Problem

_Edge = tuple[Array, int, bool]
"""Costs, the node at the other end, and whether that one chooses the column."""


def lighter(problem: Problem, choice: Sequence[int]) -> tuple[int, ...]:
    """`choice` with strategies that use fewer bytes, one node after the other, wherever no cost grows by it: neither
    the node's nor that of any of its edges. So no kind of seconds grows, and the step does not either."""
    found = list(choice)
    edges = _edges(problem)
    waiting = [node for node in range(len(found)) if problem.usages and problem.usages[node].any()]
    while waiting:
        turned = [node for node in waiting if _turn(problem, edges[node], found, node)]
        waiting = sorted({other for node in turned for _, other, _ in edges[node]})
    return tuple(found)


def _edges(problem: Problem) -> list[list[_Edge]]:
    found: list[list[_Edge]] = [[] for _ in problem.node_costs]
    for (i, j), costs in zip(problem.edges, problem.edge_costs, strict=True):
        found[i].append((costs, j, True))
        found[j].append((costs, i, False))
    return found


def _turn(problem: Problem, edges: Sequence[_Edge], choice: list[int], node: int) -> bool:
    """Give the node, in place, the strategy of the fewest bytes that costs no more anywhere; whether it is another."""
    now, usages, costs = choice[node], problem.usages[node], problem.node_costs[node]
    better = (usages < usages[now]) & (costs <= costs[now])
    for matrix, other, is_row in edges:
        if not better.any():
            return False
        line = matrix[:, choice[other]] if is_row else matrix[choice[other]]
        better &= line <= line[now]
    if not better.any():
        return False
    choice[node] = int(np.argmin(np.where(better, usages, np.inf)))
    return True
