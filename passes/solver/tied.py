"""A problem whose equal layers choose alike: one node for all that are alike, of the sum of their costs.

    embedding - layer - layer - layer - layer - head    ->    embedding - layer (x 4) - head

Any choice of it is one of the problem. It is as small as a model of a few layers, so the best one is found soon.
Nothing is proven by it of choices that differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .alike import Alike
from .graph import Graph
from .problem import Array, Problem
from .tables import Tables

__all__ = ["Ties"]


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
