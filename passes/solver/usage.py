"""What a node uses over time: a step function of the memory rows for every one of its strategies.

A node that others were merged into uses what all of them use, each while it is live. Rows at which all strategies
use the same bind no choice; they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .problem import Array
from .tables import Index

__all__ = ["RangeMinimum", "Usage", "combine"]


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
        if len(self.first) < 8:
            for first, last, used in zip(self.first, self.last, self.used[:, 0], strict=True):
                slack[first:last] -= used
        else:
            slope = np.zeros(len(slack) + 1)
            self.add_to(slope, 0)
            slack -= np.cumsum(slope)[:-1]

    def at_rows(self, first: Index, last: Index) -> Usage:
        """The same at other rows."""
        return Usage(first, last, self.used)

    def at(self, row: int) -> Array | None:
        """[S]: use at `row`; None if nothing there depends on the strategy."""
        place = int(np.searchsorted(self.first, row, side="right")) - 1
        return self.used[place] if place >= 0 and row < self.last[place] else None

    def where(self, rows: NDArray[np.bool_]) -> Usage | None:
        """Only the ranges that touch a row in `rows` [T]."""
        count = np.concatenate([[0], np.cumsum(rows)])
        return self._some(count[self.last] > count[self.first])

    def priced(self, before: Array) -> Array:
        """[S]: cost at prices per row; before [T + 1] are their sums over the rows before each."""
        return (before[self.last] - before[self.first]) @ self.used

    def add_to(self, slope: Array, strategy: int, sign: float = 1.0) -> None:
        """Add what `strategy` uses to a profile given by its differences [T + 1]."""
        np.add.at(slope, self.first, sign * self.used[:, strategy])
        np.add.at(slope, self.last, -sign * self.used[:, strategy])


class RangeMinimum:
    """Minima over ranges of an array, by a table of those over every power of two."""

    def __init__(self, values: Array) -> None:
        self._levels = [values]
        width = 1
        while 2 * width <= len(values):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def __call__(self, first: Index, last: Index) -> Array:
        """Minima of the non-empty ranges [first, last)."""
        level = np.log2(last - first).astype(np.int64)  # exact: ranges are far shorter than 2**48
        result = np.empty(len(first))
        for k in np.unique(level):
            at = level == k
            table = self._levels[k]
            result[at] = np.minimum(table[first[at]], table[last[at] - (1 << int(k))])
        return result


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
