"""Equal layers of a graph: nodes that look alike from near.

    embedding - layer - layer - layer - ... - layer - head        as it is
    embedding - layer - layer - (layer x 28) - layer - head       as it looks from 1 away

Alike are nodes with the same costs, the same cost matrices around them, and neighbours of which that is true, and so
on for `REACH` steps.

`Ties` makes of what is alike one node, of the sum of their costs: a problem as small as a model of a few layers, any
choice of which is one of the whole. Nothing is proven by it of choices that differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .graph import Graph
from .problem import Array, Problem, Tables

REACH = 2
"""Steps from a node that are looked at. So near to what is irregular nodes are kinds of their own: a Llama of 16 layers
has 148 kinds of 1,820 nodes at one step, 180 at two and 337 at six."""


def alike(graph: Graph) -> dict[int, int]:
    """Node -> the first that it is alike, of a graph whose equal arrays are one, as tables make them."""
    nodes = sorted(graph.cost)
    like = _firsts({node: id(graph.cost[node]) for node in nodes})
    for _ in range(REACH):
        around = {
            node: tuple(sorted((id(matrix), like[other]) for other, matrix in graph.adjacent[node].items()))
            for node in nodes
        }
        like = _firsts({node: (like[node], around[node]) for node in nodes})
    return like


def _firsts(kind: Mapping[int, Hashable]) -> dict[int, int]:
    """Each key's first that has the same value."""
    first: dict[Hashable, int] = {}
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
        like = alike(Graph.of(problem, tables))
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
