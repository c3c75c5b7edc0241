"""Lower bounds by passing messages, without memory rows: sequential tree-reweighted message passing.

A message is a vector [S_j] per directed edge i -> j that moves cost between edge and node, changing no total:
    node'[a]    = node[a] + sum of messages into it
    edge'[a, b] = edge[a, b] - message into i [a] - message into j [b]
so for any messages, sum of min(node') + sum of min(edge') is a lower bound, and the bound plus what a strategy (or a
pair) has above the minima it takes part in bounds every choice that uses it. The dual values of the relaxation in
marginal form are such messages too. [Kolmogorov, Convergent tree-reweighted message passing, 2006.]
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .alike import Alike, Side
from .graph import Graph
from .problem import Array

__all__ = ["Messages", "ascend", "decode", "lower_bound", "prune", "zero_messages"]

Messages = dict[tuple[int, int], Array]
"""(from, to) -> [S_to]."""


@dataclass(frozen=True)
class _Sweep:
    """Per node in order: the neighbours before and after it."""

    order: tuple[int, ...]
    before: Mapping[int, tuple[int, ...]]
    after: Mapping[int, tuple[int, ...]]


def _sweep(graph: Graph) -> _Sweep:
    order = tuple(sorted(graph.cost))
    around = {node: sorted(graph.adjacent[node]) for node in order}
    return _Sweep(
        order,
        {node: tuple(other for other in around[node] if other < node) for node in order},
        {node: tuple(other for other in around[node] if other > node) for node in order},
    )


def zero_messages(graph: Graph) -> Messages:
    return {(i, j): np.zeros(len(graph.cost[j])) for i, row in graph.adjacent.items() for j in row}


def ascend(graph: Graph, messages: Messages, passes: int, deadline: float) -> Messages:
    """Improve `messages` in place by passes over the nodes, forward and backward. Needs arc consistency.

    Returns the messages to bound and prune with: in them every edge also holds the share of the node cost that its
    message was made with, so that it is 0 at least everywhere and what is left at nodes adds up to the bound.
    """
    sweep = _sweep(graph)
    settled: Messages = {}
    for done in range(passes):
        if done and time.monotonic() > deadline:
            break
        _one_way(graph, messages, sweep.order, sweep.before, sweep.after)
        settled = _one_way(graph, messages, sweep.order[::-1], sweep.after, sweep.before)
    return settled


def _one_way(
    graph: Graph,
    messages: Messages,
    order: tuple[int, ...],
    before: Mapping[int, tuple[int, ...]],
    after: Mapping[int, tuple[int, ...]],
) -> Messages:
    settled: Messages = {}
    for node in order:
        ahead = after[node]
        if not ahead:
            continue
        share = _node_cost(graph, messages, node) / max(len(ahead), len(before[node]))
        adjacent = graph.adjacent[node]
        for other in ahead:
            left = messages[other, node] - share
            message = (adjacent[other] - left[:, None]).min(axis=0)
            message -= message.min()
            messages[node, other] = settled[node, other] = message
            settled[other, node] = left
    return settled


def _node_cost(graph: Graph, messages: Messages, node: int) -> Array:
    total = graph.cost[node].copy()
    for other in graph.adjacent[node]:
        total += messages[other, node]
    return total


def _edge_cost(graph: Graph, messages: Messages, i: int, j: int) -> Array:
    return graph.adjacent[i][j] - messages[j, i][:, None] - messages[i, j]


def lower_bound(graph: Graph, messages: Messages) -> float:
    """No choice of the graph's nodes costs less (memory rows aside)."""
    total = graph.constant
    for node, around in graph.adjacent.items():
        total += float(_node_cost(graph, messages, node).min())
        for other in around:
            if node < other:
                total += float(_edge_cost(graph, messages, node, other).min())
    return total


def decode(graph: Graph, messages: Messages) -> dict[int, int]:
    """A choice: nodes in order, each the best given the ones before it and the messages of those after it."""
    choice: dict[int, int] = {}
    for node in sorted(graph.cost):
        total = graph.cost[node].copy()
        for other, matrix in graph.adjacent[node].items():
            total += matrix[:, choice[other]] if other in choice else messages[other, node]
        choice[node] = int(np.argmin(total))
    return choice


def prune(graph: Graph, messages: Messages, bound: float, cutoff: float, alike: Alike | None = None) -> float:
    """Forbid, in place, what the messages prove to cost `cutoff` or more.

    `bound` is `lower_bound(graph, messages)`. Returns what is proven of all that went: no choice that uses any of it
    costs less. At least `cutoff`; inf if nothing went. Whole strategies get the cost inf; arc consistency removes them.

    alike: of the graph; what is like something that has to stay, stays, so that it is alike ever after.
    """
    room, alike = cutoff - bound, alike or Alike.none(graph)
    above: dict[int, Array] = {}
    for node in graph.cost:
        total = _node_cost(graph, messages, node)
        above[node] = total - total.min()
    joint = {node: vector.copy() for node, vector in above.items()}
    edges = [(i, j) for i in sorted(graph.adjacent) for j in sorted(graph.adjacent[i]) if i < j]
    pairs: dict[tuple[Side, Side], Array] = {}
    for i, j in edges:
        total = _pairs_above(graph, messages, (i, j), above, joint)
        kind = alike.kind(i, j)
        pairs[kind] = np.minimum(pairs[kind], total) if kind in pairs else total
    strategies: dict[int, Array] = {}
    for node, vector in joint.items():
        first = alike.like[node]
        strategies[first] = np.minimum(strategies[first], vector) if first in strategies else vector
    least = float("inf")
    for i, j in edges:
        matrix, total = graph.adjacent[i][j], pairs[alike.kind(i, j)]
        dead = (total >= room) & np.isfinite(matrix)
        if dead.any():
            graph.set_edge(i, j, graph.tables.intern(np.where(dead, np.inf, matrix)))
            least = min(least, float(total[dead].min()))
    for node, cost in list(graph.cost.items()):
        vector = strategies[alike.like[node]]
        dead = (vector >= room) & np.isfinite(cost)
        least = min(least, float(vector[dead].min(initial=np.inf)))
        graph.forbid(node, dead)
    return bound + least


def _pairs_above(
    graph: Graph,
    messages: Messages,
    edge: tuple[int, int],
    above: Mapping[int, Array],
    joint: dict[int, Array],
) -> Array:
    """[S_i, S_j] What every pair takes above the bound; to that of each strategy in `joint`, what the edge adds."""
    i, j = edge
    extra = _edge_cost(graph, messages, i, j)
    extra -= extra.min()
    joint[i] += extra.min(axis=1)
    joint[j] += extra.min(axis=0)
    return extra + above[i][:, None] + above[j]
