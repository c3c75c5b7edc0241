"""The search within a memory limit: exact reductions with all rows, then prices, and a program for the rest.

1. Prices of memory, found together with messages, give a bound and choices, which are repaired to fit.
2. What the bound proves to cost as much as the best choice is forbidden; what is left is reduced again.
3. If that is not too large it goes to HiGHS; if it is, prices are improved as long as that helps.

For prices p[t] >= 0 per byte at row t, least (cost + sum_t p[t] * (usage[t] - slack[t])) bounds every choice that fits;
messages bound that from below. Both are improved in turn: some passes of messages at fixed prices, then a step of
the prices towards rows that the messages' favourites overfill. Every pair of them gives a valid bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from .branches import Search, prune
from .core import Budget
from .graph import DeadEnd, Graph
from .passing import MessagePassing
from .presolve import presolve
from .problem import Array
from .row_programs import Bound, forbid_same, priced, solve_rows
from .usage import Rows

PASSES = 2


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
    passing = MessagePassing(graph)
    messages = passing.zeros() if start is None else passing.packed(start.messages)
    # First step of the prices as a share of Polyak's; it shrinks when that many steps in a row raise no bound.
    share, stalled, count = 1.0, 0, 0
    best: Bound | None = None
    smooth = np.zeros(len(prices))
    while True:
        copy = priced(graph, rows, prices)
        passing.recost(copy)
        settled = passing.ascend(messages, PASSES if count else 3 * PASSES, until)
        bound = passing.lower_bound(settled)
        if best is None or bound > best.bound:
            gain = np.inf if best is None else bound - best.bound
            best = Bound(copy, passing.unpacked(settled), prices, bound)
            stalled = 0 if gain > 1e-4 * abs(bound) else stalled + 1
        else:
            stalled += 1
        choice = passing.decode(messages)
        cost = offer(choice, prices)
        count += 1
        if time.monotonic() > until or cost - best.bound <= tolerance or share < 0.01:
            return best
        if stalled >= 6:
            share, stalled = share * 0.7, 0
        target = cost if np.isfinite(cost) else bound + 0.05 * abs(bound)
        smooth = 0.5 * smooth + 0.5 * (rows.profile(choice) - rows.slack)
        active = np.where((prices > 0) | (smooth > 0), smooth, 0.0)
        norm = float(active @ active)
        if norm:
            prices = np.maximum(0.0, prices + share * max(target - bound, 1e-4 * abs(target)) / norm * active)


PROGRAM_LIMIT, SMALL = 400_000, 50_000
"""Edge entries of the largest graph that goes to HiGHS as a whole; and of one that goes there at once."""


class MemorySearch:
    """State of the search: the best choice that fits, its cost, and the proven bound.

    `graph` is the problem reduced with all memory rows. best: of the nodes of the graph. prices: of memory by the
    graph's rows, as far as they were found.
    """

    def __init__(self, graph: Graph, budget: Budget, warm: dict[int, int] | None = None) -> None:
        """warm: a choice of the graph's nodes from which better ones are looked for, if it can be made to fit."""
        self.graph, self.rows, self.budget = graph, graph.rows(), budget
        self.best: dict[int, int] | None = None
        self.cost, self.bound = float("inf"), -float("inf")
        self.prices: Mapping[int, float] = {}
        self._prices: Array = np.zeros(len(self.rows.slack))
        self._priced: Bound | None = None
        self._seconds_of_repair = 0.0
        self._favourites = 0
        self._start = time.monotonic()
        if warm is not None:
            self._repair(warm, self._prices)

    def solve(self) -> None:
        """Fill `best`, `cost` and `bound`. Raises DeadEnd if nothing fits."""
        tried: tuple[float, float] | None = None  # what was known when prices were improved for what is left
        if self.graph.entries() > SMALL:
            # Shares of the time left for prices where the graph is larger, and for improving them.
            self._price(0.1)
        while not self._done():
            left = self._pruned()
            if left is None:
                return
            limit = SMALL if tried is None and self.best is not None else PROGRAM_LIMIT
            if left.entries() <= limit:
                self._close(left)
                break
            if tried == (self.cost, self.bound):
                break
            tried = self.cost, self.bound
            self._price(0.05)
        if self.best is None:  # even if time has run out
            self._price(1.0)

    def _done(self) -> bool:
        return self.cost - self.bound <= self.budget.tolerance or self.budget.spent

    def _until(self, share: float) -> float:
        now = time.monotonic()
        return now + share * max(0.0, self.budget.deadline - now)

    def _raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, min(bound, self.cost))

    def _take(self, choice: dict[int, int]) -> None:
        cost = self.graph.value(choice)
        if cost < self.cost and self.rows.fits(choice):
            self.best, self.cost = choice, cost

    def _price(self, share: float) -> None:
        last: dict[int, int] = {}

        def offer(choice: dict[int, int], prices: Array) -> float:
            nonlocal last
            last = choice
            self._favourites += 1
            # Of the favourites at prices each so many-th is repaired; of those that programs give, as
            # many as this share of the time allows. A repair takes as long as many steps of the prices.
            if self._favourites % 8 == 0:
                self._repair(choice, prices)
            return self.cost

        found = improve_prices(
            self.graph, self.rows, self._priced, self._until(share), offer, self.budget.tolerance
        )
        self._priced, self._prices = found, found.prices
        self.prices = self.prices or self.rows.of_graph(found.prices)
        self._raise_bound(found.bound)
        if self.best is None:
            self._repair(last, found.prices)

    def _repair_in_turn(self, choice: dict[int, int]) -> None:
        """Repair a choice and improve it, unless that has taken long already."""
        now = time.monotonic()
        if self.best is None or self._seconds_of_repair < 0.4 * (now - self._start):
            self._repair(choice, self._prices)
            self._seconds_of_repair += time.monotonic() - now

    def _repair(self, choice: dict[int, int], prices: Array) -> None:
        search = Search(self.graph, self.rows, choice, self.rows.priced(prices))
        unit = float(np.abs(self.rows.slack).max(initial=0.0)) or 1.0
        price = max(float(prices.max(initial=0.0)), 1e-3 * abs(self.graph.value(choice)) / unit)
        if not np.isfinite(price):
            price = 1.0
        # Seconds after the deadline that finding a first choice that fits may take.
        until = self.budget.deadline + (5.0 if self.best is None else 0.0)
        if search.repair(price, until):
            search = Search(self.graph, self.rows, search.choice, {})
            search.descend(float("inf"), until)
            self._take(search.choice)

    def _pruned(self) -> Graph | None:
        """What is left of the graph that may be better than the best choice; None: nothing."""
        left, bound = self.graph.twin(), self._priced
        if bound is None or not np.isfinite(self.cost):
            return left
        cutoff = self.cost - self.budget.tolerance / 2
        try:
            copy = bound.graph.twin()
            prune(copy, bound.messages, bound.bound, cutoff)
            forbid_same(left, copy)
            presolve(left, self.budget.deadline)
        except DeadEnd:
            self._raise_bound(cutoff)
            return None
        return left

    def _close(self, left: Graph) -> None:
        """Search what is left by programs."""
        answer = solve_rows(left, self.cost, self.budget, self._offer)
        self._raise_bound(answer.bound)
        self.prices = answer.prices or self.prices
        if answer.closed and self.best is None:
            raise DeadEnd(min(self.graph.cost, default=-1))

    def _offer(self, left: Graph, rows: Rows, choice: dict[int, int]) -> float:
        full = left.expand(choice)
        if rows.fits(choice):
            self._take(full)
        else:
            self._repair_in_turn(full)
        return self.cost
