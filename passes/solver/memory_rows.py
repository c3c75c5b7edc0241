"""The search within a memory limit: exact reductions with all rows, then prices, parts, and a program for the rest.

1. Prices of memory, found together with messages, give a bound and choices, which are repaired to fit.
2. What the bound proves to cost as much as the best choice is forbidden; what is left is reduced again.
3. If that is small it goes to HiGHS; if not, parts of the best choice are solved exactly, again and again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .binding import Bound, forbid_same, improve_prices, solve_rows
from .branches import Search, prune
from .core import Budget
from .graph import DeadEnd, Graph, cost_beside
from .presolve import presolve
from .problem import Array, Tables
from .usage import Rows


def grow(graph: Graph, seeds: list[int], entries: int, rng: np.random.Generator) -> list[int]:
    """Nodes around `seeds`, taken in random order from the edge of what is there, up to so many edge entries."""
    inside: set[int] = set()
    frontier = list(dict.fromkeys(seeds))
    total = 0
    while frontier and total < entries:
        place = int(rng.integers(len(frontier)))
        frontier[place], frontier[-1] = frontier[-1], frontier[place]
        node = frontier.pop()
        if node in inside:
            continue
        inside.add(node)
        total += len(graph.cost[node])
        for other, matrix in graph.adjacent[node].items():
            if other in inside:
                total += matrix.size
            else:
                frontier.append(other)
    return sorted(inside)


def part_of(graph: Graph, rows: Rows, choice: Mapping[int, int], nodes: list[int]) -> Graph:
    """The problem of choosing for `nodes`, all others as in `choice`; its constant is the cost of those."""
    kept, tables = set(nodes), Tables(graph.tables)
    part = Graph(tables, {}, {node: {} for node in nodes})
    for node in nodes:
        edges = graph.adjacent[node].items()
        outside = [edge for edge in edges if edge[0] not in kept]
        for other, matrix in edges:
            if other in kept and node < other:
                part.set_edge(node, other, tables.intern(matrix))
        part.cost[node] = tables.intern(cost_beside(graph.cost[node], outside, choice))
    own = np.zeros(len(rows.slack) + 1)
    for node in nodes:
        usage = rows.usages.get(node)
        if usage is not None:
            usage.add_to(own, choice[node])
            part.use[node] = [usage]
    part.slack = rows.slack - rows.profile(choice) + np.cumsum(own)[:-1]
    part.constant = graph.value(choice) - part.value(choice)
    return part


def improve_part(
    graph: Graph, rows: Rows, choice: dict[int, int], nodes: list[int], budget: Budget
) -> dict[int, int] | None:
    """A cheaper choice that differs from `choice` only at `nodes`; None if none was found."""
    part = part_of(graph, rows, choice, nodes)
    now = part.value(choice)
    best, cost = None, now

    def offer(left: Graph, left_rows: Rows, found: dict[int, int]) -> float:
        nonlocal best, cost
        full = left.expand(found)
        value = left.value(found)
        if value < cost - budget.tolerance / 2 and left_rows.fits(found):
            best, cost = full, value
        return cost

    solve_rows(part, now, budget, offer)
    return None if best is None else {**choice, **best}


PROGRAM_LIMIT, SMALL = 400_000, 50_000
"""Edge entries of the largest graph that goes to HiGHS as a whole; and of one that goes there at once."""


@dataclass
class PartSize:
    """Of parts that are solved exactly. entries: of the edges of the next one. pace: seconds that it should take, from
    `least` to `most`: longer after one that could not be improved, and shorter after one that could. Twice as large a
    part takes over three times as long: it is worth that where smaller ones fail."""

    entries: float = 20_000.0
    least: float = 0.5
    most: float = 3.0
    pace: float = 0.5

    def learn(self, seconds: float, improved: bool) -> None:
        """Of a part that took so long."""
        self.entries = min(200_000, max(1_000, self.entries * (1 / 1.15 if seconds > self.pace else 1.15)))
        self.pace = min(self.most, max(self.least, self.pace * (1 / 1.2 if improved else 1.1)))


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
        self._part = PartSize()
        self._start = time.monotonic()
        self._rng = np.random.default_rng(0)
        if warm is not None:
            self._repair(warm, self._prices)

    def solve(self) -> None:
        """Fill `best`, `cost` and `bound`. Raises DeadEnd if nothing fits."""
        if self.graph.entries() > SMALL:
            # Shares of the time left for prices where the graph is larger, for improving them, and for
            # solving parts. Parts lower the cost, prices only say where to start and when to stop.
            self._price(0.1)
        improved = None  # whether parts of the best choice could be improved; None: not tried
        while not self._done():
            left = self._pruned()
            if left is None:
                return
            small, exact = left.entries() <= SMALL, left.entries() <= PROGRAM_LIMIT
            if exact and (small or self.best is None or improved is not None):
                whole = small or self.best is None or not improved
                # Share of the time left for that, if there is a choice that parts could improve.
                if self._close(left, 1.0 if whole else 0.5) or whole:
                    break
            if self.best is not None:
                # Parts in a row that could not be improved, after which no more are tried for now.
                improved = self._improve_parts(0.4, 15 if exact else 200)
            if not self._done():
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

    def _close(self, left: Graph, share: float) -> bool:
        """Search what is left by programs; True if that ended the search."""
        answer = solve_rows(left, self.cost, Budget(self._until(share), self.budget.tolerance), self._offer)
        self._raise_bound(answer.bound)
        self.prices = answer.prices or self.prices
        if answer.closed and self.best is None:
            raise DeadEnd(min(self.graph.cost, default=-1))
        return answer.closed

    def _offer(self, left: Graph, rows: Rows, choice: dict[int, int]) -> float:
        full = left.expand(choice)
        if rows.fits(choice):
            self._take(full)
        else:
            self._repair_in_turn(full)
        return self.cost

    def _improve_parts(self, share: float, patience: int) -> bool:
        """Solve parts of the best choice for a while; True if that found something better."""
        assert self.best is not None
        until, before, part, failures = self._until(share), self.cost, self._part, 0
        part.pace = part.least
        while time.monotonic() < until and not self._done() and failures < patience:
            start = time.monotonic()
            nodes = grow(self.graph, self._seeds(), int(part.entries), self._rng)
            # A part need not be improved by less than this share of the gap.
            worth = max(self.budget.tolerance, 1e-4 * (self.cost - self.bound))
            limit = min(start + part.most, until)
            better = improve_part(self.graph, self.rows, self.best, nodes, Budget(limit, worth))
            if better is not None:
                self._take(better)
            failures = 0 if better is not None else failures + 1
            part.learn(time.monotonic() - start, better is not None)
        return self.cost < before

    def _seeds(self) -> list[int]:
        """Nodes to grow a part from: one, or several that share a full row."""
        nodes = self.rows.nodes
        if self._rng.random() < 0.5 or not len(self.rows.slack):
            return [int(self._rng.choice(nodes))]
        weight = self._prices + 1e-12
        row = int(self._rng.choice(len(weight), p=weight / weight.sum()))
        live = sorted(self.rows.single(row).used)
        return (
            [int(node) for node in self._rng.choice(live, min(len(live), 4), replace=False)]
            if live
            else [nodes[0]]
        )
