"""Prices for memory, found together with messages: a bound for graphs of any size.

For prices p[t] >= 0 per byte at row t, least (cost + sum_t p[t] * (usage[t] - slack[t])) bounds every choice that fits;
messages bound that from below. Both are improved in turn: some passes of messages at fixed prices, then a step of
the prices towards rows that the messages' favourites overfill. Every pair of them gives a valid bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .dual import Messages, ascend, decode, lower_bound, zero_messages
from .graph import Graph
from .problem import Array
from .usage_rows import Rows

__all__ = ["Bound", "forbid_same", "improve_prices", "priced"]

PASSES = 2
STEP, SHRINK, PATIENCE = 1.0, 0.7, 6
"""First step of the prices as a share of Polyak's; it shrinks when that many steps in a row raise no bound."""
SMALLEST = 0.01


@dataclass(frozen=True, eq=False)
class Bound:
    """`graph`: a copy without rows, priced at `prices` [rows]; with the messages it gives `bound`."""

    graph: Graph
    messages: Messages
    prices: Array
    bound: float


def priced(graph: Graph, rows: Rows, prices: Array) -> Graph:
    """`graph` with its memory rows moved into its costs: less or equal for every choice that fits. No trail."""
    moved = graph.twin()
    moved.constant -= float(prices @ rows.slack)
    extra = rows.priced(prices)
    for p, node in enumerate(rows.nodes):
        if node in rows.usages:
            moved.cost[node] = graph.cost[node] + extra[rows.start[p] : rows.start[p + 1]]
    moved.use.clear()
    moved.slack = np.zeros(0)
    return moved


def forbid_same(graph: Graph, pruned: Graph) -> None:
    """Forbid in `graph` what is forbidden in its priced copy."""
    for node, vector in pruned.cost.items():
        graph.forbid(node, ~np.isfinite(vector))
        for other, matrix in pruned.adjacent[node].items():
            if node < other:
                graph.set_edge(node, other, matrix)


def improve_prices(
    graph: Graph,
    rows: Rows,
    start: Bound | None,
    until: float,
    offer: Callable[[dict[int, int], Array], float],
    tolerance: float,
) -> Bound:
    """The best bound found until `until`, or until steps become useless.

    start: an earlier answer for the same graph.
    offer: takes the messages' favourite choice and the prices, and returns the least known cost of a choice that fits.
    """
    prices = np.zeros(len(rows.slack)) if start is None else start.prices
    messages = zero_messages(graph) if start is None else dict(start.messages)
    share, stalled, count = STEP, 0, 0
    best: Bound | None = None
    smooth = np.zeros(len(prices))
    while True:
        copy = priced(graph, rows, prices)
        settled = ascend(copy, messages, PASSES if count else 3 * PASSES, until)
        bound = lower_bound(copy, settled)
        if best is None or bound > best.bound:
            gain = np.inf if best is None else bound - best.bound
            best = Bound(copy, settled, prices, bound)
            stalled = 0 if gain > 1e-4 * abs(bound) else stalled + 1
        else:
            stalled += 1
        choice = decode(copy, messages)
        cost = offer(choice, prices)
        count += 1
        if time.monotonic() > until or cost - best.bound <= tolerance or share < SMALLEST:
            return best
        if stalled >= PATIENCE:
            share, stalled = share * SHRINK, 0
        target = cost if np.isfinite(cost) else bound + 0.05 * abs(bound)
        smooth = 0.5 * smooth + 0.5 * (rows.profile(choice) - rows.slack)
        active = np.where((prices > 0) | (smooth > 0), smooth, 0.0)
        norm = float(active @ active)
        if norm:
            prices = np.maximum(0.0, prices + share * max(target - bound, 1e-4 * abs(target)) / norm * active)
