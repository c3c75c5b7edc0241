"""Improving a choice by changing one node at a time, within the limit or towards it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from .graph import Graph, cost_beside
from .problem import Array
from .usage import Rows


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
            total = cost_beside(graph.cost[node], graph.adjacent[node].items(), best)
            a = int(np.argmin(total))
            if total[a] < total[best[node]]:
                best[node] = a
                dirty.update(graph.adjacent[node])
        if not dirty:
            break
    return best


class Search:
    """Local search over a reduced graph, its memory rows included.

    State: a choice, per node the cost [S_i] of each of its strategies given its neighbours, and what the choice uses
    above the room [rows].
    """

    def __init__(
        self, graph: Graph, rows: Rows, choice: Mapping[int, int], extra: Mapping[int, Array]
    ) -> None:
        """extra: node -> [S_i] added to its cost: prices of memory that guide a repair."""
        self.graph, self.rows, self.extra = graph, rows, extra
        self.choice = dict(choice)
        self.over = np.append(rows.profile(choice) - rows.slack, -np.inf)  # the end is no row
        self.around: dict[int, Array] = {node: self._around(node) for node in rows.nodes}
        self._ranges = {
            node: np.stack([usage.first, usage.last], axis=1).ravel() for node, usage in rows.usages.items()
        }

    def _around(self, node: int) -> Array:
        cost = self.graph.cost[node] + self.extra.get(node, 0.0)
        return cost_beside(cost, self.graph.adjacent[node].items(), self.choice)

    def fits(self) -> bool:
        return float(self.over.max()) <= 0

    def possible(self) -> bool:
        """No impossible pair is chosen."""
        return all(np.isfinite(self.around[node][a]) for node, a in self.choice.items())

    def repair(self, price: float, deadline: float) -> bool:
        """Descend on cost + price * overflow, with a price that doubles until the choice fits."""
        for _ in range(40):
            if self.fits():
                return self.possible()
            if time.monotonic() > deadline:
                return False
            self.descend(price, deadline, 4)
            price *= 2
        return self.fits() and self.possible()

    def descend(self, price: float, deadline: float, passes: int = 20) -> None:
        """Best single changes for cost + price * overflow until none helps; price inf: never overflow more."""
        dirty = dict.fromkeys(self.rows.nodes)
        for _ in range(passes):
            batch, dirty = dirty, {}
            for node in batch:
                if self._improve(node, price):
                    dirty.update(dict.fromkeys(self.graph.adjacent[node]))
                    dirty[node] = None
            if not dirty or time.monotonic() > deadline:
                return
            if not np.isinf(price):
                dirty |= dict.fromkeys(self._overfilling())

    def _overfilling(self) -> list[int]:
        """The nodes whose strategy matters at a row that is overfilled."""
        count = np.concatenate([[0], np.cumsum(self.over > 0)])
        return [
            node for node, ranges in self._ranges.items() if (count[ranges[1::2]] > count[ranges[::2]]).any()
        ]

    def _improve(self, node: int, price: float) -> bool:
        now, around = self.choice[node], self.around[node]
        usage = self.rows.usages.get(node)
        if usage is None:
            best = int(np.argmin(around))
        else:
            peak = np.maximum.reduceat(self.over, self._ranges[node])[::2]
            if around[now] <= around.min() and peak.max() <= 0:
                return False
            extra = usage.used - usage.used[:, [now]]
            if np.isinf(price):
                total = np.where(((peak[:, None] + extra <= 0) | (extra <= 0)).all(axis=0), around, np.inf)
            else:
                after = np.maximum(0.0, peak[:, None] + extra).sum(axis=0)
                total = around + price * (after - np.maximum(0.0, peak).sum())
            best = int(np.argmin(total))
            around = total
        least = around[now] if np.isinf(around[now]) else around[now] - 1e-12 * abs(around[now])
        if not around[best] < least:
            return False
        self._change(node, best)
        return True

    def _change(self, node: int, strategy: int) -> None:
        old = self.choice[node]
        self.choice[node] = strategy
        usage = self.rows.usages.get(node)
        if usage is not None:
            usage.add_each(self.over, usage.used[:, strategy] - usage.used[:, old])
        for other, matrix in self.graph.adjacent[node].items():
            if np.isfinite(matrix[old]).all():
                self.around[other] = self.around[other] - matrix[old] + matrix[strategy]
            else:
                self.around[other] = self._around(other)
