"""Strategies that are never needed, because another one of the same node is at least as good whatever the rest do.

a makes b needless if cost[a] - cost[b] + sum over edges of max_k (matrix[a, k] - matrix[b, k]) <= 0, and a uses no
more than b in any memory row. (Goldstein's dead-end elimination.) Of equals the lowest index stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .graph import Graph
from .problem import Array
from .tables import BLOCK, Index

__all__ = ["needed_strategies"]

WORK_LIMIT = 400_000_000
"""Skip a matrix with more multiply-adds than this: the comparison would cost more than the search."""


def needed_strategies(graph: Graph, node: int) -> Index | None:
    """The strategies of `node` that are not dominated; None if all are needed."""
    cost = graph.cost[node]
    matrices = [graph.adjacent[node][other] for other in sorted(graph.adjacent[node])]
    if any(matrix.size * len(cost) > WORK_LIMIT for matrix in matrices):
        return None
    better, worse = graph.tables.once(
        ("dominated", id(cost), *map(id, matrices)), lambda: _dominated(cost, matrices)
    )
    dominates = np.zeros((len(cost), len(cost)), dtype=bool)
    dominates[better, worse] = True
    usage = graph.usage(node)
    if usage is not None:
        _forbid_more(dominates, usage.used)
    dominates &= ~(np.tril(dominates) & np.triu(dominates).T)  # equals: the lower index stays
    if not dominates.any():
        return None
    return _survivors(dominates)


def _dominated(cost: Array, matrices: Sequence[Array]) -> tuple[Index, Index]:
    """Pairs of strategies of which the first makes the second needless, memory rows aside.

    Most pairs are told apart by a few columns: all columns are compared only for those that are not.
    """
    with np.errstate(invalid="ignore"):  # inf - inf: not comparable, and nan <= 0 is false
        least = cost[:, None] - cost
        for matrix in matrices:
            least += _some_excess(matrix)
        np.fill_diagonal(least, np.inf)
        first, second = np.nonzero(~(least > 0))
        total = cost[first] - cost[second]
        for matrix in matrices:
            total += excess(matrix, first, second)
    found = total <= 0
    return first[found], second[found]


def _some_excess(matrix: Array) -> Array:
    """[a, b] at most `excess`: that of the column in which b costs least, and of the one in which a costs most."""
    every = np.arange(len(matrix))
    best, worst = matrix.argmin(axis=1), matrix.argmax(axis=1)
    at_best = matrix[:, best] - matrix[every, best]
    at_worst = matrix[every, worst][:, None] - matrix[:, worst].T
    found = np.fmax(at_best, at_worst)
    found[np.isnan(found)] = -np.inf
    return found


def excess(matrix: Array, first: Index, second: Index) -> Array:
    """[pairs] = max over k of matrix[first, k] - matrix[second, k], over the k that the second allows.

    What the first can cost more on this edge at worst; inf where the second allows a k that the first does not.
    """
    found = np.empty(len(first))
    step = max(1, BLOCK // matrix.shape[1])
    for start in range(0, len(first), step):
        pairs = slice(start, start + step)
        np.fmax.reduce(matrix[first[pairs]] - matrix[second[pairs]], axis=1, out=found[pairs])
    found[np.isnan(found)] = -np.inf  # nothing but inf - inf
    return found


def _forbid_more(dominates: NDArray[np.bool_], used: Array) -> None:
    """Strike out, in place, the pairs of which the first uses more than the second anywhere."""
    first, second = np.nonzero(dominates)
    step = max(1, BLOCK // len(used))
    for start in range(0, len(first), step):
        a, b = first[start : start + step], second[start : start + step]
        dominates[a, b] = (used[:, a] <= used[:, b]).all(axis=0)


def _survivors(dominates: NDArray[np.bool_]) -> Index:
    """Remove one at a time, each by one that is still there: rounding could make a cycle."""
    alive = np.ones(len(dominates), dtype=bool)
    for b in np.flatnonzero(dominates.any(axis=0)):
        alive[b] = not (dominates[:, b] & alive).any()
    return np.flatnonzero(alive)
