"""Exact reductions, repeated until none applies: what is left is the core.

Cheap ones first: strategies that some edge makes impossible (arc consistency), nodes with one strategy, edges that
are a sum of row and column costs, nodes with at most two neighbours (min-plus product). Then per node the dear
ones: merging neighbours that follow from it, and dominated strategies. A node whose usage in an active memory row
depends on its strategy is never eliminated; merging and dropping strategies stay exact for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from .dominate import needed_strategies
from .graph import DeadEnd, Graph

__all__ = ["presolve", "propagate"]

FILL_LIMIT = 4_000_000
"""Entries of the largest edge matrix that an elimination may make."""


class _Queue:
    """Nodes to look at, lowest index first, each at most once."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._waiting = set(nodes)
        self._heap = sorted(self._waiting)

    def push(self, node: int) -> None:
        if node not in self._waiting:
            self._waiting.add(node)
            heapq.heappush(self._heap, node)

    def pop(self) -> int:
        node = heapq.heappop(self._heap)
        self._waiting.discard(node)
        return node

    def __bool__(self) -> bool:
        return bool(self._heap)


def presolve(graph: Graph) -> None:
    """Reduce `graph` in place. Raises DeadEnd if a node has no possible strategy left."""
    touched = sorted(graph.cost)
    while touched:
        _reduce(graph, touched)
        touched = _drop_oversized(graph)


def _reduce(graph: Graph, nodes: list[int]) -> None:
    cheap, dear = _Queue(nodes), _Queue(nodes)
    while cheap or dear:
        first_pass = bool(cheap)
        node = cheap.pop() if first_pass else dear.pop()
        if node not in graph.cost:
            continue
        around = list(graph.adjacent[node])
        changed = _reduce_cheaply(graph, node) if first_pass else _reduce_dearly(graph, node)
        if changed:
            for other in (node, *around):
                if other in graph.cost:
                    cheap.push(other)
                    dear.push(other)


def _drop_oversized(graph: Graph) -> list[int]:
    """Drop strategies that do not fit even where all other nodes use their least; the nodes that changed."""
    changed: list[int] = []
    for node in sorted(graph.use):
        fits = np.ones(len(graph.cost[node]), dtype=bool)
        for row, usage in graph.use[node].items():
            fits &= usage <= graph.slack[row]
        if not fits.all():
            graph.restrict(node, np.flatnonzero(fits))
            changed += [node, *graph.adjacent[node]]
    if any(slack < 0 for slack in graph.slack.values()):
        raise DeadEnd(min(graph.cost, default=-1))
    return sorted(set(changed))


def propagate(graph: Graph) -> None:
    """Arc consistency alone: drop every strategy that has no partner over some edge. Raises DeadEnd."""
    queue = _Queue(graph.cost)
    while queue:
        node = queue.pop()
        if _drop_impossible(graph, node):
            for other in graph.adjacent[node]:
                queue.push(other)


def _reduce_cheaply(graph: Graph, node: int) -> bool:
    changed = _drop_impossible(graph, node)
    changed |= _drop_separable(graph, node)
    if node in graph.use:
        return changed
    around = graph.adjacent[node]
    if len(graph.cost[node]) > 1:
        if len(around) > 2:
            return changed
        if len(around) == 2 and np.prod([float(len(graph.cost[other])) for other in around]) > FILL_LIMIT:
            return changed
    graph.eliminate(node)
    return True


def _reduce_dearly(graph: Graph, node: int) -> bool:
    if _merge_followers(graph, node):
        return True
    keep = needed_strategies(graph, node)
    if keep is not None:
        graph.restrict(node, keep)
    return keep is not None


def _drop_impossible(graph: Graph, node: int) -> bool:
    alive = np.isfinite(graph.cost[node])
    for matrix in graph.adjacent[node].values():
        alive = alive & graph.tables.possible(matrix)
    if not alive.any():
        raise DeadEnd(node)
    if alive.all():
        return False
    graph.restrict(node, np.flatnonzero(alive))
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
        if len(graph.cost[other]) == len(graph.cost[node]) or len(graph.adjacent[other]) <= 3:
            graph.merge(other, node, follows)
            return True
    return False
