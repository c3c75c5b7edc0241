"""What a node uses over time: a step function of the memory rows for every one of its strategies.

A node that others were merged into uses what all of them use, each while it is live. Rows at which all strategies
use the same bind no choice; they are left out.

`Rows` are the memory rows of a reduced graph, as few as bind: usage by its changes from row to row, so that it stays
sparse. Between two changes of what is live all rows are one. A row is left out if the next or the last one uses at
least as much of every strategy and has no more room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from .problem import Array, Index


@dataclass(frozen=True, eq=False)
class Usage:
    """Disjoint ranges of rows in ascending order, [first, last), and what each strategy uses there.

    first, last: [m] positions in `Problem.steps`.
    used:        [m, S], not negative.
    """

    first: Index
    last: Index
    used: Array

    @staticmethod
    def of(first: int, last: int, used: Array) -> Usage:
        """The same use [S] throughout one range."""
        return Usage(np.array([first]), np.array([last]), np.asarray(used, dtype=np.float64)[None, :])

    def take(self, strategies: Index) -> Usage:
        """Strategy k of the result is strategy `strategies[k]`."""
        return Usage(self.first, self.last, self.used[:, strategies])

    def settled(self) -> tuple[Usage | None, Usage | None]:
        """What depends on the strategy, and what is used anyway (one strategy); None where there is nothing."""
        least = self.used.min(axis=1)
        if not least.any():
            return self._some(self.used.any(axis=1)), None
        rest = Usage(self.first, self.last, self.used - least[:, None])
        anyway = Usage(self.first, self.last, least[:, None])
        return rest._some(rest.used.any(axis=1)), anyway._some(least > 0)

    def _some(self, chosen: ArrayLike) -> Usage | None:
        ranges = np.asarray(chosen, dtype=np.bool_)
        if ranges.all():
            return self
        return Usage(self.first[ranges], self.last[ranges], self.used[ranges]) if ranges.any() else None

    def subtract_from(self, slack: Array) -> None:
        """Subtract, in place, what the only strategy uses."""
        self.add_each(slack, -self.used[:, 0])

    def add_each(self, profile: Array, used: Array) -> None:
        """Add `used` [m], in place, throughout each of the ranges."""
        if len(self.first) < 8:
            for first, last, more in zip(self.first, self.last, used, strict=True):
                profile[first:last] += more
        else:
            slope = np.zeros(len(profile) + 1)
            np.add.at(slope, self.first, used)
            np.add.at(slope, self.last, -used)
            profile += np.cumsum(slope)[:-1]

    def at_rows(self, first: Index, last: Index) -> Usage:
        """The same at other rows."""
        return Usage(first, last, self.used)

    def at(self, row: int) -> Array | None:
        """[S]: use at `row`; None if nothing there depends on the strategy."""
        place = int(np.searchsorted(self.first, row, side="right")) - 1
        return self.used[place] if place >= 0 and row < self.last[place] else None

    def where(self, before: Index) -> Usage | None:
        """Only the ranges that touch some of the rows of which so many are `before` each [T + 1]."""
        return self._some(before[self.last] > before[self.first])

    def ranges(self) -> Index:
        """[2 m]: of `over_ranges`."""
        return np.stack([self.first, self.last], axis=1).ravel()

    def priced(self, before: Array) -> Array:
        """[S]: cost at prices per row; before [T + 1] are their sums over the rows before each."""
        return (before[self.last] - before[self.first]) @ self.used


def before_each(rows: NDArray[np.bool_]) -> Index:
    """[T + 1]: how many of the rows [T] are before each, and in all."""
    return np.concatenate([[0], np.cumsum(rows)])


def over_ranges(reduced: np.ufunc, values: Array, ranges: Index) -> Array:
    """[m]: `values` [T + 1] reduced over each range. What is behind the last is not looked at."""
    return reduced.reduceat(values[: ranges[-1] + 1], ranges)[::2]


def combine(parts: Sequence[Usage]) -> Usage:
    """The sum of all."""
    queue = list(parts)
    while len(queue) > 1:
        pairs = zip(queue[0::2], queue[1::2], strict=False)
        queue = [_plus(a, b) for a, b in pairs] + ([queue[-1]] if len(queue) % 2 else [])
    return queue[0]


def _plus(left: Usage, right: Usage) -> Usage:
    points = np.unique(np.concatenate([left.first, left.last, right.first, right.last]))
    start, end = points[:-1], points[1:]
    total = _at(left, start) + _at(right, start)
    some = total.any(axis=1)
    start, end, total = start[some], end[some], total[some]
    joined = np.zeros(len(start), dtype=bool)  # with the range before
    joined[1:] = (start[1:] == end[:-1]) & (total[1:] == total[:-1]).all(axis=1)
    heads = np.flatnonzero(~joined)
    tails = np.append(heads[1:], len(start)) - 1
    return Usage(start[heads], end[tails], total[heads])


def _at(usage: Usage, rows: Index) -> Array:
    """[rows, S]"""
    place = np.searchsorted(usage.first, rows, side="right") - 1
    inside = (place >= 0) & (rows < usage.last[place])
    return np.where(inside[:, None], usage.used[place], 0.0)


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
    def of(sizes: Mapping[int, int], used: Mapping[int, Usage], slack: Array) -> Rows:
        """Those that bind of rows [T] with so much `slack`. sizes: node -> number of strategies, ascending."""
        nodes = tuple(sizes)
        start = np.concatenate([[0], np.cumsum(list(sizes.values()))]).astype(np.int64)
        if not used:
            short = np.sort(slack)[:1]  # a row that nothing uses binds if it has no room to begin with
            short = short[short < 0]
            at = np.argsort(slack)[: len(short)]
            return Rows(nodes, start, {}, csr_array((len(short), int(start[-1]))), short, at)
        edges = [points for usage in used.values() for points in (usage.first, usage.last)]
        points = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *edges]))
        points = points[points < len(slack)]
        spans = zip(points, [*points[1:], len(slack)], strict=True)
        least = np.minimum.reduceat(slack, points)
        at = np.array([first + int(np.argmin(slack[first:last])) for first, last in spans])
        usages = {
            node: usage.at_rows(np.searchsorted(points, usage.first), np.searchsorted(points, usage.last))
            for node, usage in used.items()
        }
        return Rows(nodes, start, usages, _slopes(nodes, start, usages, len(points)), least, at)._binding()

    def _binding(self) -> Rows:
        rows = self
        while len(rows.slack) > 1:
            needless = rows._needless()
            if not needless.any():
                break
            place = before_each(~needless)  # of a row, or of the next that is kept
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

    def priced(self, prices: Array) -> dict[int, Array]:
        """Node -> [S_i]: cost of what is used, at `prices` [rows]."""
        extra = self.slope.T @ np.cumsum(prices[::-1])[::-1]
        return {node: extra[self.start[p] : self.start[p + 1]] for p, node in enumerate(self.nodes)}

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
