"""Exact reductions, repeated until none applies: what is left is the core.

Cheap ones first: strategies that some edge makes impossible (arc consistency), nodes with one strategy, edges that are
sums of row and column costs, nodes with at most two neighbours (min-plus product). Then the expensive ones: merging
neighbours that follow from a node, and dominated strategies. A node whose usage in a memory row depends on its strategy
is never eliminated; merging and dropping stay exact.

A strategy is dominated if another is at least as good whatever the rest do: a makes b needless if cost[a] - cost[b] +
sum over edges of max_k (matrix[a, k] - matrix[b, k]) <= 0, and a uses no more than b in any memory row (Goldstein). Of
equals the lowest index stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from .graph import DeadEnd, Graph
from .problem import BLOCK, Array, Index
from .usage import before_each, over_ranges


def needed_strategies(graph: Graph, node: int) -> Index | None:
    """The strategies of `node` that are not dominated; None if all are needed."""
    cost = graph.cost[node]
    matrices = [graph.adjacent[node][other] for other in sorted(graph.adjacent[node])]
    # With more multiply-adds than this the comparison would cost more than the search.
    if any(matrix.size * len(cost) > 400_000_000 for matrix in matrices):
        return None
    pairs = lambda: dominated_pairs(cost, matrices)
    usage = graph.usage(node)
    if usage is None:
        return graph.tables.once("needed", (cost, *matrices), lambda: _survivors(len(cost), pairs(), None))
    return _survivors(len(cost), graph.tables.once("dominated", (cost, *matrices), pairs), usage.used)


def dominated_pairs(cost: Array, matrices: Sequence[Array]) -> tuple[Index, Index]:
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
            total += _excess(matrix, first, second)
    found = total <= 0
    return first[found], second[found]


def _some_excess(matrix: Array) -> Array:
    """[a, b] at most `_excess`: that of the column in which b costs least, and of the one in which a costs most."""
    every = np.arange(len(matrix))
    best, worst = matrix.argmin(axis=1), matrix.argmax(axis=1)
    at_best = matrix[:, best] - matrix[every, best]
    at_worst = matrix[every, worst][:, None] - matrix[:, worst].T
    found = np.fmax(at_best, at_worst)
    found[np.isnan(found)] = -np.inf
    return found


def _excess(matrix: Array, first: Index, second: Index) -> Array:
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


def _survivors(count: int, pairs: tuple[Index, Index], used: Array | None) -> Index | None:
    """Strategies that are left of `count` where the first of a pair makes the second needless, unless it uses more
    anywhere; None: all. They go one at a time, each by one that is still there: rounding could make a cycle."""
    first, second = pairs
    if used is not None and len(first):
        step = max(1, BLOCK // len(used))
        parts = [slice(start, start + step) for start in range(0, len(first), step)]
        less = np.concatenate([(used[:, first[p]] <= used[:, second[p]]).all(axis=0) for p in parts])
        first, second = first[less], second[less]
    if not len(first):
        return None
    dominates = np.zeros((count, count), dtype=bool)
    dominates[first, second] = True
    dominates &= ~(np.tril(dominates) & np.triu(dominates).T)  # equals: the lower index stays
    alive = np.ones(count, dtype=bool)
    for b in np.flatnonzero(dominates.any(axis=0)):
        alive[b] = not (dominates[:, b] & alive).any()
    return np.flatnonzero(alive)


def presolve(graph: Graph, until: float = float("inf"), latest: float = float("inf")) -> None:
    """Reduce `graph` in place. Raises DeadEnd if a node has no possible strategy left.

    After `until` (time.monotonic) only cheap reductions go on; after `latest` only what the rest relies on: that every
    strategy has a partner over every edge.
    """
    _drop_oversized(graph)
    touched = sorted(graph.cost)
    while touched:
        _reduce(graph, touched, until, latest)
        if time.monotonic() > latest:
            propagate(graph)
        touched = _drop_oversized(graph)


def _reduce(graph: Graph, nodes: list[int], until: float, latest: float) -> None:
    """In rounds, so that a node with thousands of neighbours is looked at once for many changes around it."""
    cheap, expensive = set(nodes), set(nodes)
    while cheap or expensive:
        step, batch = (_reduce_cheaply, sorted(cheap)) if cheap else (_reduce_expensively, sorted(expensive))
        (cheap or expensive).clear()
        for node in batch:
            if time.monotonic() > latest:
                return
            if node not in graph.cost or (step is _reduce_expensively and time.monotonic() > until):
                continue
            around = list(graph.adjacent[node])
            if step(graph, node):
                changed = [other for other in (node, *around) if other in graph.cost]
                cheap.update(changed)
                expensive.update(changed)


def _drop_oversized(graph: Graph) -> list[int]:
    """Drop strategies that do not fit even where all other nodes use their least; the nodes that changed. Rows that no
    choice can overfill bind nothing: what is used there is forgotten."""
    if not graph.use:
        if (graph.slack < 0).any():
            raise DeadEnd(min(graph.cost, default=-1))
        return []
    changed: list[int] = []
    binding = before_each(_most(graph) > graph.slack)
    room = np.append(graph.slack, np.inf)  # the end is no row
    for node in sorted(graph.use):
        usage = graph.usage(node)
        if usage is None or (usage := graph.keep_use(node, binding)) is None:
            changed += [node, *graph.adjacent[node]]
            continue
        least = over_ranges(np.minimum, room, usage.ranges())
        fits = (usage.used <= least[:, None]).all(axis=0)
        if not fits.all():
            graph.restrict(node, np.flatnonzero(fits))
            changed += [node, *graph.adjacent[node]]
    if (graph.slack < 0).any():
        raise DeadEnd(min(graph.cost, default=-1))
    return sorted(node for node in set(changed) if node in graph.cost)


def _most(graph: Graph) -> Array:
    """[rows]: more than that the nodes in `use` cannot use."""
    slope = np.zeros(len(graph.slack) + 1)
    for node in sorted(graph.use):
        usage = graph.usage(node)
        if usage is not None:
            most = usage.used.max(axis=1)
            np.add.at(slope, usage.first, most)
            np.add.at(slope, usage.last, -most)
    return np.cumsum(slope)[:-1]


def propagate(graph: Graph) -> None:
    """Arc consistency alone: drop every strategy that has no partner over some edge. Raises DeadEnd."""
    waiting = set(graph.cost)
    while waiting:
        batch = sorted(waiting)
        waiting.clear()
        for node in batch:
            if _drop_impossible(graph, node):
                waiting.update(graph.adjacent[node])


def _reduce_cheaply(graph: Graph, node: int) -> bool:
    changed = _drop_impossible(graph, node)
    changed |= _drop_separable(graph, node)
    if node in graph.use:
        return changed
    around = graph.adjacent[node]
    if len(graph.cost[node]) > 1:
        if len(around) > 2:
            return changed
        # Entries of the largest edge matrix that an elimination may make.
        if len(around) == 2 and np.prod([float(len(graph.cost[other])) for other in around]) > 1_000_000:
            return changed
    graph.eliminate(node)
    return True


def _reduce_expensively(graph: Graph, node: int) -> bool:
    if _merge_followers(graph, node):
        return True
    keep = needed_strategies(graph, node)
    if keep is not None:
        graph.restrict(node, keep)
    return keep is not None


def _drop_impossible(graph: Graph, node: int) -> bool:
    tables, cost, matrices = graph.tables, graph.cost[node], tuple(graph.adjacent[node].values())

    def possible() -> Index | None:
        alive = np.isfinite(cost)
        for matrix in matrices:
            alive = alive & tables.possible(matrix)
        return None if alive.all() else np.flatnonzero(alive)

    keep = tables.once("alive", (cost, *matrices), possible)
    if keep is None:
        return False
    graph.restrict(node, keep)
    return True


def _drop_separable(graph: Graph, node: int) -> bool:
    changed = False
    for other in sorted(graph.adjacent[node]):
        parts = graph.tables.separate(graph.adjacent[node][other])
        if parts is not None:
            graph.drop_edge(node, other)
            graph.add_cost(node, parts[0])
            graph.add_cost(other, parts[1])
            changed = True
    return changed


def _merge_followers(graph: Graph, node: int) -> bool:
    """Merge a neighbour whose strategy follows from the node's, unless that would blow up its other edges."""
    for other in sorted(graph.adjacent[node]):
        follows = graph.tables.function(graph.adjacent[node][other])
        if follows is None:
            continue
        one_to_one = len(graph.cost[other]) == len(graph.cost[node]) == len(np.unique(follows))
        if one_to_one and len(graph.adjacent[other]) > len(graph.adjacent[node]):
            graph.merge(node, other, np.argsort(follows))  # few edges move
            return True
        if one_to_one or len(graph.adjacent[other]) <= 3:
            graph.merge(other, node, follows)
            return True
    return False
