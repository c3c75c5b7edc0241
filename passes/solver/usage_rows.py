"""The memory rows of a reduced graph, as few as bind: usage by its changes from row to row, so that it stays sparse.

Between two changes of what is live all rows are one. A row is left out if the next or the last one uses at least
as much of every strategy and has no more room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from .graph import Graph
from .problem import Array
from .usage import RangeMinimum, Usage

__all__ = ["Row", "Rows"]


@dataclass(frozen=True, eq=False)
class Row:
    """One row: node -> [S_i], the sum of whose choice is `slack` at most."""

    slack: float
    used: Mapping[int, Array]


@dataclass(frozen=True, eq=False)
class Rows:
    """Sum over the choice of what it uses at `row` <= slack[row].

    nodes:  ascending; `start[p]` is the column of the first strategy of `nodes[p]`, `start[-1]` the number of columns.
    usages: node -> what it uses, at these rows; only nodes that use anything.
    slope:  [rows, columns]: what each column uses at a row, less what it uses at the row before.
    slack:  [rows]
    at:     [rows]: a row of the graph that each stands for.
    """

    nodes: tuple[int, ...]
    start: NDArray[np.int64]
    usages: Mapping[int, Usage]
    slope: csr_array
    slack: Array
    at: NDArray[np.int64]

    @staticmethod
    def of(graph: Graph) -> Rows:
        nodes = tuple(sorted(graph.cost))
        start = np.concatenate([[0], np.cumsum([len(graph.cost[node]) for node in nodes])]).astype(np.int64)
        found = {node: usage for node in nodes if (usage := graph.usage(node)) is not None}
        if not found:
            short = np.sort(graph.slack)[:1]  # a row that nothing uses binds if it has no room to begin with
            short = short[short < 0]
            at = np.argsort(graph.slack)[: len(short)]
            return Rows(nodes, start, {}, csr_array((len(short), int(start[-1]))), short, at)
        edges = [points for usage in found.values() for points in (usage.first, usage.last)]
        points = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *edges]))
        points = points[points < len(graph.slack)]
        ends = np.append(points[1:], len(graph.slack))
        slack = RangeMinimum(graph.slack)(points, ends)
        spans = zip(points, ends, strict=True)
        at = np.array([first + int(np.argmin(graph.slack[first:last])) for first, last in spans])
        usages = {
            node: usage.at_rows(np.searchsorted(points, usage.first), np.searchsorted(points, usage.last))
            for node, usage in found.items()
        }
        return Rows(nodes, start, usages, _slopes(nodes, start, usages, len(points)), slack, at)._binding()

    def _binding(self) -> Rows:
        rows = self
        while len(rows.slack) > 1:
            needless = rows._needless()
            if not needless.any():
                break
            place = np.concatenate([[0], np.cumsum(~needless)])  # of a row, or of the next that is kept
            usages = {}
            for node, usage in rows.usages.items():
                first, last = place[usage.first], place[usage.last]
                some = first < last
                if some.any():
                    usages[node] = Usage(first[some], last[some], usage.used[some])
            kept, at = rows.slack[~needless], rows.at[~needless]
            slopes = _slopes(rows.nodes, rows.start, usages, len(kept))
            rows = Rows(rows.nodes, rows.start, usages, slopes, kept, at)
        return rows

    def _needless(self) -> NDArray[np.bool_]:
        change = self.slope[1:]
        rises = np.asarray(change.min(axis=1).todense()).ravel() >= 0
        falls = np.asarray(change.max(axis=1).todense()).ravel() <= 0
        more_room = np.diff(self.slack)
        needless = np.zeros(len(self.slack), dtype=bool)
        needless[:-1] = rises & (more_room <= 0)
        needless[1:] |= falls & (more_room >= 0) & ~needless[:-1]
        return needless

    def profile(self, choice: Mapping[int, int]) -> Array:
        x = np.zeros(int(self.start[-1]))
        if len(self.nodes):
            x[self.start[:-1] + np.array([choice[node] for node in self.nodes])] = 1.0
        return self.expected(x)

    def expected(self, x: Array) -> Array:
        """[rows]: use of a choice given by its share [columns] of every strategy."""
        return np.cumsum(self.slope @ x)

    def priced(self, prices: Array) -> Array:
        """[columns]: cost of what is used, at `prices` [rows]."""
        return self.slope.T @ np.cumsum(prices[::-1])[::-1]

    def of_graph(self, prices: Array) -> dict[int, float]:
        """`prices` [rows] by the rows of the graph."""
        return {int(self.at[row]): float(prices[row]) for row in np.flatnonzero(prices > 0)}

    def single(self, row: int) -> Row:
        used = {node: vector for node, usage in self.usages.items() if (vector := usage.at(row)) is not None}
        return Row(float(self.slack[row]), used)

    def fits(self, choice: Mapping[int, int]) -> bool:
        return bool((self.profile(choice) <= self.slack).all())

    def violated(self, choice: Mapping[int, int], most: int) -> list[int]:
        """Rows that a choice overfills, as `tops` picks them."""
        return self.tops(self.profile(choice) - self.slack, 0.0, most)

    def tops(self, over: Array, tolerance: float, most: int) -> list[int]:
        """The top of each stretch of `over` [rows] above `tolerance`, the `most` largest."""
        outside = np.flatnonzero(
            np.diff(np.concatenate([[False], over > tolerance, [False]]).astype(np.int8))
        )
        tops = [first + int(np.argmax(over[first:last])) for first, last in outside.reshape(-1, 2)]
        return sorted(sorted(tops, key=lambda row: (-over[row], row))[:most])


def _slopes(
    nodes: tuple[int, ...], start: NDArray[np.int64], usages: Mapping[int, Usage], count: int
) -> csr_array:
    rows: list[NDArray[np.int64]] = []
    columns: list[NDArray[np.int64]] = []
    values: list[Array] = []
    for p, node in enumerate(nodes):
        usage = usages.get(node)
        if usage is not None:
            at, strategy = np.nonzero(usage.used)
            used = usage.used[at, strategy]
            rows += [usage.first[at], usage.last[at]]
            columns += [start[p] + strategy] * 2
            values += [used, -used]
    if not rows:
        return csr_array((count, int(start[-1])))
    row = np.concatenate(rows)
    inside = row < count
    place = (row[inside], np.concatenate(columns)[inside])
    matrix = csr_array((np.concatenate(values)[inside], place), shape=(count, int(start[-1])))
    matrix.eliminate_zeros()
    return matrix
