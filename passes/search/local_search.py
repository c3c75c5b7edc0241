"""Improving a choice by changing one node at a time, within the limit or towards it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from .graph import Graph
from .problem import Array, Problem

__all__ = ["Search", "descend"]


def descend(graph: Graph, choice: Mapping[int, int], passes: int = 50) -> dict[int, int]:
    """Best strategy of each node in turn, given its neighbours, until nothing improves. Ignores memory rows."""
    best = dict(choice)
    order = sorted(graph.cost)
    dirty = set(order)
    for _ in range(passes):
        for node in order:
            if node not in dirty:
                continue
            dirty.discard(node)
            total = graph.cost[node].copy()
            for other, matrix in graph.adjacent[node].items():
                total += matrix[:, best[other]]
            a = int(np.argmin(total))
            if total[a] < total[best[node]]:
                best[node] = a
                dirty.update(graph.adjacent[node])
        if not dirty:
            break
    return best


class Search:
    """Local search over the whole problem, memory included.

    `graph` is the problem unreduced, without rows. State: a choice, per node the cost [S_i] of each of its
    strategies given its neighbours, and the usage at every step.
    """

    def __init__(self, problem: Problem, graph: Graph, choice: Sequence[int]) -> None:
        assert problem.limit is not None
        self.problem, self.graph, self.limit = problem, graph, float(problem.limit)
        self.choice = list(choice)
        self.profile = problem.profile(choice)
        self.around: list[Array] = [
            graph.cost[node] + sum((m[:, choice[k]] for k, m in graph.adjacent[node].items()), np.zeros(1))
            for node in range(len(self.choice))
        ]

    @property
    def overflow(self) -> float:
        """Sum over steps of the usage above the limit."""
        return float(np.maximum(0.0, self.profile - self.limit).sum())

    def fits(self) -> bool:
        return not len(self.profile) or float(self.profile.max()) <= self.limit

    def repair(self, price: float, deadline: float, rounds: int = 40) -> bool:
        """Descend on cost + price * overflow, with a price that doubles until the choice fits."""
        for _ in range(rounds):
            if self.fits():
                return True
            if time.monotonic() > deadline:
                return False
            self.descend(price, deadline)
            price *= 2
        return self.fits()

    def descend(self, price: float, deadline: float, passes: int = 20) -> None:
        """Best single changes for cost + price * overflow until none helps; price inf: never overflow more."""
        for _ in range(passes):
            changed = False
            for node in range(len(self.choice)):
                changed |= self._improve(node, price)
            if not changed or time.monotonic() > deadline:
                return

    def _improve(self, node: int, price: float) -> bool:
        now = self.choice[node]
        gain = self.around[node] - self.around[node][now]
        span = self.problem.live.get(node)
        if span is not None:
            usage = np.asarray(self.problem.usages[node], dtype=np.float64)
            extra = usage - usage[now]
            if (gain.min() >= 0) and (extra.min() >= 0 or not self._over(span)):
                return False
            gain = gain + self._penalty(span, extra, price)
        best = int(np.argmin(gain))
        if not gain[best] < -1e-12 * abs(self.around[node][now]):
            return False
        self._change(node, best)
        return True

    def _over(self, span: tuple[int, int]) -> bool:
        return bool(self.profile[span[0] : span[1]].max() > self.limit)

    def _penalty(self, span: tuple[int, int], extra: Array, price: float) -> Array:
        over = self.profile[span[0] : span[1]] - self.limit
        if np.isinf(price):
            return np.where((extra > 0) & (extra > -over.max()), np.inf, 0.0)
        level = over.max() + extra.max()
        if level <= 0:
            return np.zeros(len(extra))
        values, back = np.unique(extra, return_inverse=True)
        before = np.maximum(0.0, over).sum()
        after = np.array([np.maximum(0.0, over + value).sum() for value in values])
        return price * (after - before)[back]

    def _change(self, node: int, strategy: int) -> None:
        old = self.choice[node]
        self.choice[node] = strategy
        span = self.problem.live.get(node)
        if span is not None:
            usage = self.problem.usages[node]
            self.profile[span[0] : span[1]] += float(usage[strategy]) - float(usage[old])
        for other, matrix in self.graph.adjacent[node].items():
            with np.errstate(invalid="ignore"):
                moved = self.around[other] - matrix[old] + matrix[strategy]
            if not np.isfinite(matrix[old]).all():
                moved = self.graph.cost[other].copy()
                for third, table in self.graph.adjacent[other].items():
                    moved += table[:, self.choice[third]]
            self.around[other] = moved
