"""Strategies that are never needed, because another one of the same node is at least as good whatever the rest do.

a makes b needless if cost[a] - cost[b] + sum over edges of max_k (matrix[a, k] - matrix[b, k]) <= 0, and a uses no
more than b in any memory row. (Goldstein's dead-end elimination.) Of equals the lowest index stays.
"""

from __future__ import annotations

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
    if any(matrix.size * len(cost) > WORK_LIMIT for matrix in graph.adjacent[node].values()):
        return None
    worse = cost[:, None] - cost[None, :]
    with np.errstate(invalid="ignore"):  # inf - inf: not comparable, and nan <= 0 is false
        for other in sorted(graph.adjacent[node]):
            worse = worse + graph.tables.excess(graph.adjacent[node][other])
    dominates = worse <= 0
    usage = graph.usage(node)
    if usage is not None:
        _forbid_more(dominates, usage.used)
    np.fill_diagonal(dominates, False)
    dominates &= ~(np.tril(dominates) & np.triu(dominates).T)  # equals: the lower index stays
    if not dominates.any():
        return None
    return _survivors(dominates)


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
