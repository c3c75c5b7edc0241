"""The problem while it is being reduced: a simple graph of cost tables, and the trail back to the original.

Parallel edges are one matrix per node pair. Every change is exact and leaves a step on the trail; `expand`
walks it backwards and turns a choice of what remains into a choice of everything.

Equal layers of it are nodes that look alike from near:

    embedding - layer - layer - layer - ... - layer - head        as it is
    embedding - layer - layer - (layer x 28) - layer - head       as it looks from 1 away

Alike are nodes with the same costs, the same cost matrices around them, and neighbours of which that is true, and so
on for `REACH` steps.

`Ties` makes of what is alike one node, of the sum of their costs: a problem as small as a model of a few layers, any
choice of which is one of the whole. Nothing is proven by it of choices that differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .problem import Array, Index, Problem, Tables
from .usage import Rows, Usage, combine


class DeadEnd(Exception):
    """A node has no possible strategy left."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} has no possible strategy")
        self.node = node


def cost_beside(cost: Array, edges: Iterable[tuple[int, Array]], choice: Mapping[int, int]) -> Array:
    """[S_i] What each strategy of a node costs beside what its neighbours have. cost: [S_i] of the node itself. edges:
    neighbour, [S_i, S_j]."""
    total = cost.copy()
    for other, matrix in edges:
        total += matrix[:, choice[other]]
    return total


@dataclass(frozen=True)
class Restrict:
    """Only the strategies `keep` of `node` remain."""

    node: int
    keep: Index

    def undo(self, choice: dict[int, int]) -> None:
        choice[self.node] = int(self.keep[choice[self.node]])


@dataclass(frozen=True)
class Merge:
    """The strategy of `node` follows from that of `into`."""

    node: int
    into: int
    follows: Index

    def undo(self, choice: dict[int, int]) -> None:
        choice[self.node] = int(self.follows[choice[self.into]])


@dataclass(frozen=True)
class Eliminate:
    """`node` takes its best strategy, given those of its neighbours."""

    node: int
    cost: Array
    edges: tuple[tuple[int, Array], ...]

    def undo(self, choice: dict[int, int]) -> None:
        choice[self.node] = int(np.argmin(cost_beside(self.cost, self.edges, choice)))


@dataclass
class Graph:
    """Nodes by their index in the problem.

    cost:     node -> [S_i].
    adjacent: node -> neighbour -> [S_i, S_j]; both orientations are kept.
    use:      node -> what it uses at the memory rows, in parts to be added up; only where that depends on the
              strategy. Row: position in `Problem.steps`.
    slack:    [rows] what is left of the limit for the nodes in `use`; empty without a limit.
    constant: cost of what was reduced away.
    """

    tables: Tables
    cost: dict[int, Array]
    adjacent: dict[int, dict[int, Array]]
    use: dict[int, list[Usage]] = field(default_factory=dict[int, list[Usage]])
    slack: Array = field(default_factory=lambda: np.zeros(0))
    constant: float = 0.0
    trail: list[Restrict | Merge | Eliminate] = field(default_factory=list[Restrict | Merge | Eliminate])

    @staticmethod
    def of(problem: Problem, tables: Tables) -> Graph:
        """All nodes of `problem`, without memory rows."""
        cost = {node: tables.intern(vector) for node, vector in enumerate(problem.node_costs)}
        graph = Graph(tables, cost, {node: {} for node in cost})
        interned: dict[int, Array] = {}  # the problem's own arrays live as long as this call
        for (i, j), matrix in zip(problem.edges, problem.edge_costs, strict=True):
            if id(matrix) not in interned:
                interned[id(matrix)] = tables.intern(matrix)
            graph.add_edge(i, j, interned[id(matrix)])
        return graph

    def add_rows(self, problem: Problem) -> None:
        """Add the memory rows: all of `problem.steps`. No node may have been reduced yet."""
        assert problem.limit is not None and not self.trail
        self.slack = np.full(len(problem.steps), float(problem.limit))
        slope = np.zeros(len(problem.steps) + 1)
        for node, (first, last) in problem.live.items():
            usage = np.asarray(problem.usages[node], dtype=np.float64)
            least = float(usage.min())
            slope[first] += least
            slope[last] -= least
            if usage.max() > least:
                self.use[node] = [Usage.of(first, last, usage - least)]
        self.slack -= np.cumsum(slope)[:-1]

    def copy(self, nodes: Iterable[int] | None = None) -> Graph:
        """The part on `nodes` (all by default), which no edge may leave, with no trail and no constant."""
        kept = list(self.cost if nodes is None else nodes)
        return Graph(
            self.tables,
            {node: self.cost[node] for node in kept},
            {node: dict(self.adjacent[node]) for node in kept},
            {node: list(self.use[node]) for node in kept if node in self.use},
            self.slack.copy(),
        )

    def twin(self) -> Graph:
        """All of it, with its constant and no trail."""
        copy = self.copy()
        copy.constant = self.constant
        return copy

    def edges(self) -> list[tuple[int, int]]:
        """Each once, (i, j) with i < j, in order."""
        return sorted((i, j) for i, around in self.adjacent.items() for j in around if i < j)

    def add_cost(self, node: int, vector: Array) -> None:
        self.cost[node] = self.tables.add(self.cost[node], self.tables.intern(vector))

    def add_edge(self, i: int, j: int, matrix: Array) -> None:
        old = self.adjacent[i].get(j)
        self.set_edge(i, j, self.tables.intern(matrix) if old is None else self.tables.add(old, matrix))

    def set_edge(self, i: int, j: int, matrix: Array) -> None:
        self.adjacent[i][j] = matrix
        self.adjacent[j][i] = self.tables.transpose(matrix)

    def forbid(self, node: int, dead: NDArray[np.bool_]) -> None:
        """Make the strategies where `dead` [S_i] impossible."""
        if dead.any():
            self.cost[node] = self.tables.intern(np.where(dead, np.inf, self.cost[node]))

    def drop_edge(self, i: int, j: int) -> None:
        del self.adjacent[i][j], self.adjacent[j][i]

    def usage(self, node: int) -> Usage | None:
        """What `node` uses, as one step function; None if that does not depend on its strategy."""
        parts = self.use.get(node)
        if parts is None:
            return None
        if len(parts) > 1:
            self._set_use(node, [combine(parts)])
            parts = self.use.get(node)
        return parts[0] if parts else None

    def rows(self) -> Rows:
        """The memory rows that bind."""
        used = {node: usage for node in sorted(self.cost) if (usage := self.usage(node)) is not None}
        return Rows.of({node: len(self.cost[node]) for node in sorted(self.cost)}, used, self.slack)

    def keep_use(self, node: int, before: Index) -> Usage | None:
        """Forget what `node` uses elsewhere than at the rows of which so many are `before` each [T + 1]."""
        usage = self.usage(node)
        kept = usage and usage.where(before)
        if kept is None:
            self.use.pop(node, None)
        else:
            self.use[node] = [kept]
        return kept

    def _set_use(self, node: int, parts: Iterable[Usage]) -> None:
        self.use.pop(node, None)
        self._add_use(node, parts)

    def _add_use(self, node: int, parts: Iterable[Usage]) -> None:
        """What does not depend on the strategy goes into the slack: it binds no choice."""
        for part in parts:
            rest, anyway = part.settled()
            if anyway is not None:
                anyway.subtract_from(self.slack)
            if rest is not None:
                self.use.setdefault(node, []).append(rest)

    def restrict(self, node: int, keep: Index) -> None:
        """Keep only the strategies `keep` of `node`."""
        if not len(keep):
            raise DeadEnd(node)
        self.trail.append(Restrict(node, keep))
        self.cost[node] = self.tables.take(self.cost[node], keep)
        for other, matrix in list(self.adjacent[node].items()):
            self.set_edge(node, other, self.tables.take(matrix, keep))
        if node in self.use:
            usage = self.usage(node)
            self._set_use(node, [usage.take(keep)] if usage else [])

    def eliminate(self, node: int) -> None:
        """Minimise over `node`; exact for nodes with at most two neighbours or one strategy, and no use."""
        edges = tuple(self.adjacent[node].items())
        cost, tables = self.cost[node], self.tables
        assert node not in self.use and (len(edges) <= 2 or len(cost) == 1)
        self.trail.append(Eliminate(node, cost, edges))
        for other, _ in edges:
            self.drop_edge(node, other)
        if not edges:
            self.constant += float(cost.min())
        elif len(cost) == 1:
            self.constant += float(cost[0])
            for other, matrix in edges:
                self.cost[other] = tables.add(self.cost[other], tables.intern(matrix[0]))
        elif len(edges) == 1:
            ((other, matrix),) = edges
            self.cost[other] = tables.add(self.cost[other], tables.project(tables.transpose(matrix), cost))
        else:
            (i, to_i), (j, to_j) = sorted(edges, key=lambda edge: edge[0])
            self.add_edge(i, j, tables.min_plus(tables.transpose(to_i), cost, to_j))
        del self.cost[node], self.adjacent[node]

    def merge(self, node: int, into: int, follows: Index) -> None:
        """`node` takes strategy `follows[a]` where `into` takes a: the two become one, usages added."""
        matrix = self.adjacent[into][node]
        self.trail.append(Merge(node, into, follows))
        self.drop_edge(into, node)
        self.add_cost(into, matrix[np.arange(len(follows)), follows])
        self.cost[into] = self.tables.add(self.cost[into], self.tables.take(self.cost[node], follows))
        for other, table in list(self.adjacent[node].items()):
            self.drop_edge(node, other)
            self.add_edge(into, other, self.tables.take(table, follows))
        if node in self.use:
            moved = [part.take(follows) for part in self.use.pop(node)]
            self._add_use(into, moved)
        del self.cost[node], self.adjacent[node]

    def expand(self, choice: Mapping[int, int]) -> dict[int, int]:
        """The choice for every node that the trail starts with, from one for those that remain."""
        full = dict(choice)
        for step in reversed(self.trail):
            step.undo(full)
        return full

    def reduced(self, choice: Mapping[int, int]) -> dict[int, int]:
        """What is left of a choice for every node that the trail starts with; another strategy where its own went."""
        left = dict(choice)
        for step in self.trail:
            if isinstance(step, Restrict):
                place = int(np.searchsorted(step.keep, left[step.node]))
                kept = place < len(step.keep) and step.keep[place] == left[step.node]
                left[step.node] = place if kept else 0
            else:
                del left[step.node]
        return left

    def components(self) -> list[list[int]]:
        """Sets of nodes that no edge joins; all that share memory rows count as joined. Ascending."""
        label: dict[int, int] = {}
        parts: list[list[int]] = []
        for root in sorted(self.cost):
            if root in label:
                continue
            label[root] = len(parts)
            part, frontier = [root], [root]
            while frontier:
                for other in self.adjacent[frontier.pop()]:
                    if other not in label:
                        label[other] = len(parts)
                        part.append(other)
                        frontier.append(other)
            parts.append(sorted(part))
        tied = [part for part in parts if any(node in self.use for node in part)]
        free = [part for part in parts if not any(node in self.use for node in part)]
        return ([sorted(node for part in tied for node in part)] if tied else []) + free

    def value(self, choice: Mapping[int, int]) -> float:
        """Cost of a choice for the nodes that remain, the constant included."""
        total = self.constant
        for node, vector in self.cost.items():
            a = choice[node]
            total += float(vector[a])
            for other, matrix in self.adjacent[node].items():
                if node < other:
                    total += float(matrix[a, choice[other]])
        return total

    def entries(self) -> int:
        """Number of edge entries: the size of the program in marginal form."""
        return sum(m.size for i, row in self.adjacent.items() for j, m in row.items() if i < j)


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
