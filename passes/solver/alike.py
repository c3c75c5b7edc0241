"""Equal layers of a graph: nodes that look alike from near, and the sides of edges by which they do.

    embedding - layer - layer - layer - ... - layer - head        as it is
    embedding - layer - layer - (layer x 28) - layer - head       as it looks from 1 away

Alike are nodes with the same costs, the same cost matrices around them, and neighbours of which that is true, and so
on for `REACH` steps. A *side* is an edge as it is seen from one of its nodes; alike are sides with the same matrix,
whose node is alike, and whose other node is so from one step less far. So all nodes that are alike have the same number
of sides of each kind, which is all that a sum over them needs.

`Ties` makes of what is alike one node, of the sum of their costs: a problem as small as a model of a few layers, any
choice of which is one of the whole. Nothing is proven by it of choices that differ from layer to layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from .graph import Graph
from .problem import Array, Problem, Tables

K = TypeVar("K", int, tuple[int, int])

REACH = 2
"""Steps from a node that are looked at. So near to what is irregular nodes are kinds of their own: a Llama of 16 layers
has 148 kinds of 1,820 nodes at one step, 180 at two and 337 at six."""

Side = tuple[int, int]
"""(node, neighbour)."""


@dataclass(frozen=True)
class Alike:
    """like: node -> the first that it is alike. side_like: side -> the first that it is alike."""

    like: Mapping[int, int]
    side_like: Mapping[Side, Side]

    @staticmethod
    def none(graph: Graph) -> Alike:
        """Every node and side is like itself alone."""
        sides = {(i, j): (i, j) for i, around in graph.adjacent.items() for j in around}
        return Alike({node: node for node in graph.cost}, sides)

    @staticmethod
    def of(graph: Graph) -> Alike:
        """Those of a graph whose equal arrays are one, as tables make them."""
        nodes = sorted(graph.cost)
        before = like = _firsts({node: id(graph.cost[node]) for node in nodes})
        for _ in range(REACH):
            around = {
                node: tuple(
                    sorted((id(matrix), like[other]) for other, matrix in graph.adjacent[node].items())
                )
                for node in nodes
            }
            before, like = like, _firsts({node: (like[node], around[node]) for node in nodes})
        sides = {
            (node, other): (like[node], id(graph.adjacent[node][other]), before[other])
            for node in nodes
            for other in sorted(graph.adjacent[node])
        }
        return Alike(like, _firsts(sides))

    @cached_property
    def count(self) -> Mapping[int, int]:
        """Of each node that is the first of its kind, how many are like it."""
        return Counter(self.like.values())

    @cached_property
    def times(self) -> Mapping[Side, int]:
        """Of each side that is the first of its kind, how many sides of its node are like it."""
        sides = Counter(self.side_like.values())
        return {side: number // self.count[self.like[side[0]]] for side, number in sides.items()}

    def kind(self, i: int, j: int) -> tuple[Side, Side]:
        """Of the edge between two nodes: both its sides'."""
        return self.side_like[i, j], self.side_like[j, i]

    @cached_property
    def edges(self) -> tuple[Side, ...]:
        """The first edge of every kind, as (i, j) with i < j."""
        kinds = {(i, j): self.kind(i, j) for i, j in sorted(self.side_like) if i < j}
        return tuple(dict.fromkeys(_firsts(kinds).values()))

    def entries(self, graph: Graph) -> int:
        """Number of edge entries, of every kind of edge once."""
        return sum(graph.adjacent[i][j].size for i, j in self.edges)


def _firsts(kind: Mapping[K, Hashable]) -> dict[K, K]:
    """Each key's first that has the same value."""
    first: dict[Hashable, K] = {}
    return {key: first.setdefault(value, key) for key, value in kind.items()}


@dataclass(frozen=True)
class Ties:
    """of: node -> the place of its kind, the first kind that occurs first. kinds: how many there are."""

    of: tuple[int, ...]
    kinds: int

    @staticmethod
    def among(problem: Problem) -> Ties:
        """Nodes are tied that are alike, for two steps around, and use the same."""
        tables = Tables()
        like = Alike.of(Graph.of(problem, tables)).like
        used: Sequence[Hashable] = [None] * len(like)
        if problem.usages:
            used = [id(tables.intern(np.asarray(usage, dtype=np.float64))) for usage in problem.usages]
        place: dict[Hashable, int] = {}
        of = tuple(place.setdefault((like[node], used[node]), len(place)) for node in range(len(like)))
        return Ties(of, len(place))

    def problem(self, problem: Problem) -> Problem:
        """`problem`, whose limit is left out, with a node for each kind."""
        costs: list[Array | None] = [None] * self.kinds
        for kind, vector in zip(self.of, problem.node_costs, strict=True):
            known = costs[kind]
            costs[kind] = vector if known is None else known + vector
        edges: dict[tuple[int, int], Array] = {}
        for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
            one, two = self.of[i], self.of[j]
            if one == two:
                before = costs[one]
                assert before is not None
                costs[one] = before + np.diagonal(matrix)
            elif (one, two) in edges:
                edges[one, two] = edges[one, two] + matrix
            else:
                edges[one, two] = matrix
        found = [vector for vector in costs if vector is not None]
        return Problem(tuple(found), tuple(edges), tuple(edges.values()))

    def expanded(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of every node, from that of every kind."""
        return tuple(int(choice[kind]) for kind in self.of)
