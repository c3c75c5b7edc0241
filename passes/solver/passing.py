"""Lower bounds by passing messages, without memory rows: sequential tree-reweighted message passing.

A message is a vector [S_j] per directed edge i -> j that moves cost between edge and node, changing no total:
    node'[a]    = node[a] + sum of messages into it
    edge'[a, b] = edge[a, b] - message into i [a] - message into j [b]
so for any messages, sum of min(node') + sum of min(edge') is a lower bound. The dual values of the relaxation in
marginal form are such messages too. [Kolmogorov, Convergent tree-reweighted message passing, 2006.]
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .graph import Graph
from .problem import Array, Index

Messages = Mapping[tuple[int, int], Array]
"""(from, to) -> [S_to]."""
Side = tuple[int, int]
"""(node, neighbour): an edge as it is seen from one of its nodes."""

LARGE = 10_000
"""Entries of an edge from which on it is computed by itself: laying it out beside others costs more than it saves."""


@dataclass(frozen=True, eq=False)
class _Step:
    """The nodes of one level, and their sides towards the levels that come later in one direction.

    nodes:  their strategies. weight: of each, the share of its cost that each later edge gets.
    behind: messages into them from the levels that are done; of: the strategy that each entry is for.
    ahead:  messages into them from the levels to come; to: likewise.
    costs:  entries of the edges ahead, for one strategy of the other node after another, from `starts` on. message:
            of each entry, its place in `ahead`. out: of each strategy, where the message to it goes. sides: the first
            such strategy of each edge.
    large:  edges ahead that are not in `costs`: [S_i, S_j], where in `ahead` its messages are, where those it sends go.
    """

    nodes: slice
    weight: Array
    behind: slice
    of: Index
    ahead: slice
    to: Index
    costs: Array
    starts: Index
    message: Index
    out: Index
    sides: Index
    large: Sequence[tuple[Array, slice, slice]]


class MessagePassing:
    """A graph laid out so that the nodes of a level pass all their messages in a few operations on arrays.

    Levels grow away from a node at the rim of the graph; no edge is within one. A deep model has few: forward, backward
    and update are near each other. Messages are one array: those of all sides (node, neighbour), first the sides
    towards lower levels, then those towards higher ones.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        levels = _levels(graph)
        level = {node: number for number, nodes in enumerate(levels) for node in nodes}
        self._nodes = list(chain(*levels))
        self._size = {node: len(graph.cost[node]) for node in self._nodes}
        self._start = _starts([self._size[node] for node in self._nodes])
        self._node_at = dict(zip(self._nodes, self._start.tolist(), strict=False))
        sides = [[(node, other) for node in nodes for other in graph.adjacent[node]] for nodes in levels]
        lower = [[side for side in part if level[side[1]] < level[side[0]]] for part in sides]
        higher = [[side for side in part if level[side[1]] > level[side[0]]] for part in sides]
        self._sides = list(chain(*lower, *higher))
        ends = _starts([self._size[node] for node, _ in self._sides])
        self._side_at = dict(zip(self._sides, ends.tolist(), strict=False))
        self._half, self._count = int(ends[sum(map(len, lower))]), int(ends[-1])
        self._level_at = _starts([sum(self._size[node] for node in nodes) for nodes in levels])
        self._node_of = _ranges(
            [self._node_at[node] for node, _ in self._sides], [self._size[node] for node, _ in self._sides]
        )
        self.recost(graph)
        self._up = self._steps(graph, lower, higher, 0, self._half)
        self._down = self._steps(graph, higher, lower, self._half, 0)[::-1]

    def recost(self, graph: Graph) -> None:
        """Take the node costs and the constant of a graph with the same edges."""
        self._constant = graph.constant
        self._cost = np.concatenate([np.zeros(0), *(graph.cost[node] for node in self._nodes)])

    def _steps(
        self,
        graph: Graph,
        behind: Sequence[Sequence[Side]],
        ahead: Sequence[Sequence[Side]],
        first: int,
        last: int,
    ) -> list[_Step]:
        """One for each level with sides ahead. first, last: where the messages of `behind` and of `ahead` begin."""
        size, sides = self._size, list(chain(*ahead))
        matrices = [graph.adjacent[other][node] for node, other in sides]
        own = np.array([size[node] for node, _ in sides], dtype=np.intp)
        laid = np.array([len(each) if each.size < LARGE else 0 for each in matrices], dtype=np.intp)
        lengths = np.repeat(own, laid)
        out = _ranges([self._side_at[other, node] for node, other in sides], laid)
        costs = np.concatenate([np.zeros(0), *(each.ravel() for each in matrices if each.size < LARGE)])
        # Where sides, strategies of other nodes, and entries of each level begin, and of each side.
        level = _starts([len(part) for part in ahead])
        at, strategy, entry = _starts(own), _starts(laid), _starts(own * laid)
        base = np.repeat(level[:-1], np.diff(level))
        local = at[:-1] - at[base]
        message = _ranges(np.repeat(local, laid), lengths)
        starts = _starts(lengths)[:-1] - np.repeat(entry[base], laid)
        behind_at = first + _starts([sum(size[node] for node, _ in part) for part in behind])
        later = np.bincount(self._node_of[last : last + at[-1]], minlength=len(self._cost))
        earlier = np.bincount(self._node_of[first : behind_at[-1]], minlength=len(self._cost))
        weight = 1.0 / np.maximum(1, np.maximum(later, earlier))
        steps: list[_Step] = []
        for number in range(len(ahead)):
            one, end = int(level[number]), int(level[number + 1])
            if one == end:
                continue
            nodes = slice(int(self._level_at[number]), int(self._level_at[number + 1]))
            done = slice(int(behind_at[number]), int(behind_at[number + 1]))
            to_come = slice(last + int(at[one]), last + int(at[end]))
            strategies, entries = slice(strategy[one], strategy[end]), slice(entry[one], entry[end])
            large: list[tuple[Array, slice, slice]] = []
            for k in (one + np.flatnonzero(laid[one:end] == 0)).tolist():
                (node, other), mine = sides[k], int(local[k])
                to = self._side_at[other, node]
                sent = slice(to, to + size[other])
                large.append((graph.adjacent[node][other], slice(mine, mine + size[node]), sent))
            steps.append(
                _Step(
                    nodes=nodes,
                    weight=weight[nodes],
                    behind=done,
                    of=self._node_of[done] - nodes.start,
                    ahead=to_come,
                    to=self._node_of[to_come] - nodes.start,
                    costs=costs[entries],
                    starts=starts[strategies],
                    message=message[entries],
                    out=out[strategies],
                    sides=strategy[one:end][laid[one:end] > 0] - strategy[one],
                    large=large,
                )
            )
        return steps

    def zeros(self) -> Array:
        return np.zeros(self._count)

    def packed(self, messages: Messages) -> Array:
        return np.concatenate([np.zeros(0), *(messages[other, node] for node, other in self._sides)])

    def unpacked(self, messages: Array) -> dict[tuple[int, int], Array]:
        at, size = self._side_at, self._size
        return {(o, n): messages[at[n, o] : at[n, o] + size[n]] for n, o in self._sides}

    def ascend(self, messages: Array, passes: int, deadline: float) -> Array:
        """Improve `messages` in place by passes over the levels, up and down. Needs arc consistency.

        Returns the messages to bound and prune with: in them every edge also holds the share of the node cost that its
        message was made with, so that it is 0 at least everywhere and what is left at nodes adds up to the bound.
        """
        kept = messages
        for done in range(passes):
            if done and time.monotonic() > deadline:
                break
            self._one_way(messages, self._up, slice(self._half, None))
            kept = self._one_way(messages, self._down, slice(0, self._half))
        return kept

    def _one_way(self, messages: Array, steps: Sequence[_Step], ahead: slice) -> Array:
        """Pass messages in one direction, in place; what `ascend` returns."""
        settled = messages.copy()
        cost = self._cost + self._at_nodes(messages, ahead)
        for step in steps:
            total = cost[step.nodes]
            total += np.bincount(step.of, messages[step.behind], len(total))
            total *= step.weight
            left = settled[step.ahead]
            left -= total.take(step.to)
            edges = step.costs - left.take(step.message)
            if len(step.out):
                messages[step.out] = np.minimum.reduceat(edges, step.starts)
            for matrix, own, out in step.large:
                np.minimum.reduce(matrix - left[own, None], axis=0, out=messages[out])
        behind = slice(0, self._half) if ahead.start else slice(self._half, None)
        settled[behind] = messages[behind]
        return settled

    def _at_nodes(self, messages: Array, part: slice) -> Array:
        """What `part` of the messages add to each strategy."""
        return np.bincount(self._node_of[part], messages[part], len(self._cost)).astype(
            np.float64, copy=False
        )

    def lower_bound(self, messages: Array) -> float:
        """No choice of the graph's nodes costs less (memory rows aside)."""
        total = self._constant
        if len(self._cost):
            nodes = self._cost + self._at_nodes(messages, slice(None))
            total += float(np.minimum.reduceat(nodes, self._start[:-1]).sum())
        for step in self._down:
            left = messages[step.ahead]
            if len(step.out):
                least = np.minimum.reduceat(step.costs - left.take(step.message), step.starts)
                least -= messages[step.out]
                total += float(np.minimum.reduceat(least, step.sides).sum())
            for matrix, own, out in step.large:
                total += float((matrix - left[own, None] - messages[out]).min())
        return total

    def decode(self, messages: Array, backward: bool = False) -> dict[int, int]:
        """A choice: nodes in order, each the best given the ones before it and the messages of those after it."""
        choice: dict[int, int] = {}
        cost = self._cost + self._at_nodes(messages, slice(None))
        for node in sorted(self._nodes, reverse=backward):
            first, size = self._node_at[node], self._size[node]
            total = cost[first : first + size]
            for other, matrix in self._graph.adjacent[node].items():
                if other in choice:
                    at = self._side_at[node, other]
                    total += matrix[:, choice[other]] - messages[at : at + size]
            choice[node] = int(total.argmin())
        return choice


def bound_of(graph: Graph, messages: Messages) -> float:
    """`lower_bound` of one array for each message."""
    passing = MessagePassing(graph)
    return passing.lower_bound(passing.packed(messages))


def _starts(sizes: Sequence[int] | Index) -> Index:
    """Where each begins that follow one another; and where the last ends."""
    return np.concatenate([np.zeros(1, np.intp), np.cumsum(np.asarray(sizes, dtype=np.intp))])


def _ranges(first: Sequence[int] | Index, sizes: Sequence[int] | Index) -> Index:
    """first[0], first[0] + 1, ..., first[1], ...: so many of each."""
    sizes = np.asarray(sizes, dtype=np.intp)
    starts = _starts(sizes)
    return np.repeat(np.asarray(first, dtype=np.intp) - starts[:-1], sizes) + np.arange(starts[-1])


def _levels(graph: Graph) -> list[list[int]]:
    """Nodes by level: one more than the highest neighbour that is nearer to the rim, or as near and of lower index."""
    distance: dict[int, int] = {}
    for root in sorted(graph.cost):
        if root not in distance:
            around = _distances(graph, root)
            distance |= _distances(graph, max(around, key=lambda node: (around[node], -node)))
    level: dict[int, int] = {}
    levels: list[list[int]] = []
    for node in sorted(distance, key=lambda node: (distance[node], node)):
        level[node] = 1 + max((level[other] for other in graph.adjacent[node] if other in level), default=-1)
        levels += [[]] if level[node] == len(levels) else []
        levels[level[node]].append(node)
    return levels


def _distances(graph: Graph, root: int) -> dict[int, int]:
    distance, queue = {root: 0}, [root]
    for node in queue:
        for other in graph.adjacent[node]:
            if other not in distance:
                distance[other] = distance[node] + 1
                queue.append(other)
    return distance
