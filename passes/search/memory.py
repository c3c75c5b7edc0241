"""The search where the limit binds: priced memory for a bound, repair for a choice, rows for the rest.

1. Prices of memory (`lagrange`): each try is a search without rows, solved by full reduction; its choice is repaired to
   fit and improved by local search.
2. With the best prices, messages forbid what is proven to cost as much as the best choice.
3. What is left is reduced with the memory rows active and goes to HiGHS; rows that its choice violates are added.
   First with a cutoff near the bound, where little is left: either a better choice is found, or the cutoff is
   proven and becomes the bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from .bounding import bound_by_relaxation, forbid_costlier
from .core import Budget, solve_graph
from .graph import DeadEnd, Graph
from .lagrange import Prices, priced, violated_rows
from .local_search import Search
from .marginal import build_program, solve_integers
from .presolve import presolve
from .problem import Infeasible, Problem
from .room import least_usage, live_nodes

__all__ = ["MemorySearch"]

PRICE_SHARE, PRICE_TRIES = 0.4, 60
"""Share of the time, and number of searches, that the prices may take."""
RECOMBINE_SHARE = 0.3
"""Share of the time left that combining the choices found may take."""
CUTOFFS = ((0.02, 0.4), (0.2, 0.2), (1.0, 1.0))
"""Cutoffs tried, as shares of the way from the bound to the best cost; and the share of the time left for each."""
GRACE = 10.0
"""Seconds after the deadline that finding a first choice that fits may take."""
NEAR = 0.01
"""Relative gap below which only the last of them is tried."""
PROGRAM_LIMIT = 3_000_000
"""Edge entries of the largest program that is handed to HiGHS."""
CONVERGED = 0.005
"""Messages are good enough to prune with when 20 passes raise the bound by less than this share of the gap."""
ROWS_AT_ONCE = 8


class MemorySearch:
    """State of the search: the best choice that fits, its cost, and the proven bound.

    `base` is the problem's graph, unreduced; `first` a choice that is best without the limit, and `bound` its bound.
    """

    def __init__(self, problem: Problem, base: Graph, first: list[int], bound: float, budget: Budget) -> None:
        assert problem.limit is not None
        self.problem, self.base, self.budget = problem, base, budget
        self.limit = float(problem.limit)
        self.best: list[int] | None = None
        self.cost = float("inf")
        self.bound = bound
        self.prices = Prices(problem)
        self.rows: set[int] = set()
        self.pool: dict[tuple[int, ...], None] = {}  # in order of discovery
        self._note({}, first, bound)

    def solve(self) -> None:
        """Fill `best`, `cost` and `bound`. Raises Infeasible."""
        self._improve_prices()
        if self.best is None:
            self._look_for_room()
        self._recombine()
        self._close_gap()
        if self.best is None:
            raise Infeasible("time")

    def _done(self) -> bool:
        return self.cost - self.bound <= self.budget.tolerance or self.budget.spent

    def _offer(self, choice: list[int]) -> bool:
        """Take a choice if it fits and is better; True if it fits."""
        if self.problem.peak(choice)[0] > self.limit:
            return False
        cost = self.problem.cost(choice)
        if cost < self.cost:
            self.best, self.cost = choice, cost
        return True

    def _raise_bound(self, bound: float) -> None:
        self.bound = max(self.bound, min(bound, self.cost))

    def _note(self, prices: dict[int, float], choice: list[int], bound: float) -> None:
        """Learn from the answer at some prices: a plane, a bound, and what repairing it yields."""
        profile = self.problem.profile(choice)
        self.pool[tuple(choice)] = None
        self.prices.add(prices, self.problem.cost(choice), profile)
        self.rows.update(violated_rows(self.problem, profile, ROWS_AT_ONCE))
        self._raise_bound(bound)
        self._repair(choice, max(prices.values(), default=0.0))

    def _repair(self, choice: list[int], price: float) -> None:
        search = Search(self.problem, self.base, choice)
        scale = abs(self.problem.cost(choice)) / self.limit if self.limit > 0 else 1.0
        until = self.budget.deadline + (GRACE if self.best is None else 0.0)
        if search.repair(max(price, 1e-3 * scale), until):
            search.descend(float("inf"), until)
            self._offer(search.choice)
            self.pool[tuple(search.choice)] = None

    def _choice(self, found: dict[int, int]) -> list[int]:
        return [found[node] for node in range(len(self.problem.node_costs))]

    def _improve_prices(self) -> None:
        start = time.monotonic()
        until = start + PRICE_SHARE * max(0.0, self.budget.deadline - start)
        if not self._price_by_relaxation(until):
            self._price_by_planes(until)

    def _price_by_relaxation(self, until: float) -> bool:
        """Prices as the dual values of memory rows, until no row is missing; False if the program is too large."""
        for _ in range(PRICE_TRIES):
            graph = self._rowed(self.rows)
            try:
                presolve(graph)
            except DeadEnd:
                self._nothing_below(float("inf"))
                return True
            if self._done() or time.monotonic() > until or not graph.cost:
                return True
            answer = bound_by_relaxation(graph, until)
            if answer is None:
                return False
            self._raise_bound(answer.bound)
            before = len(self.rows)
            self._price(answer.prices, until)
            if len(self.rows) == before:
                return True
        return True

    def _price_by_planes(self, until: float) -> None:
        for _ in range(PRICE_TRIES):
            prices, most = self.prices.propose()
            room = max(self.budget.tolerance, 1e-6 * abs(most))
            if self._done() or time.monotonic() > until or most - self.prices.best <= room:
                return
            self._price(prices, until)

    def _price(self, prices: dict[int, float], until: float) -> None:
        """Search at these prices, and learn from the answer."""
        graph = priced(self._rowed(row for row, price in prices.items() if price > 0), prices)
        accuracy = max(self.budget.tolerance, 1e-4 * abs(self.bound))
        found = solve_graph(graph, Budget(until, accuracy))
        self._note(prices, self._choice(found.choice), found.bound)

    def _rowed(self, rows: Iterable[int]) -> Graph:
        graph = self.base.copy()
        graph.add_rows(self.problem, rows)
        return graph

    def _look_for_room(self) -> None:
        """The least usage at the fullest steps: proves that nothing fits, or leads to a choice that does."""
        least = self.problem.least_profile()
        fullest = sorted(range(len(least)), key=lambda row: (-least[row], row))[:ROWS_AT_ONCE]
        for row in (*fullest, *sorted(self.rows - set(fullest))):
            usage, choice = least_usage(self.problem, self.base, row, self.budget)
            if usage > self.limit:
                raise Infeasible(
                    "memory", live_nodes(self.problem, row, choice), usage, int(self.problem.steps[row])
                )
            self._repair(choice, 1.0)
            if self.best is not None:
                return

    def _recombine(self) -> None:
        """The best choice that takes every node's strategy from one of the choices found so far."""
        now = time.monotonic()
        until = now + RECOMBINE_SHARE * (self.budget.deadline - now)
        for _ in range(PRICE_TRIES):
            if self._done() or time.monotonic() > until:
                return
            graph = self._rowed(self.rows)
            try:
                for node in sorted(graph.cost):
                    keep = np.unique([choice[node] for choice in self.pool])
                    if len(keep) < len(graph.cost[node]):
                        graph.restrict(node, keep)
                presolve(graph)
            except DeadEnd:
                return
            found, _ = self._solve_program(graph, until)
            if found is None or not self._learn_rows(self._choice(graph.expand(found))):
                return

    def _learn_rows(self, choice: list[int]) -> bool:
        """Offer the answer of a program; True if it violates rows that the program lacked, which are then noted."""
        fits = self._offer(choice)
        self._repair(choice, 0.0)
        new = set(violated_rows(self.problem, self.problem.profile(choice), ROWS_AT_ONCE)) - self.rows
        self.rows |= new
        return bool(new) and not fits

    def _close_gap(self) -> None:
        near = self.cost - self.bound <= NEAR * abs(self.cost)
        for share, time_share in CUTOFFS[-1:] if near else CUTOFFS:
            if self._done():
                return
            room = self.cost - self.budget.tolerance / 2 - self.bound
            now = time.monotonic()
            self._search_below(self.bound + share * room, now + time_share * (self.budget.deadline - now))

    def _search_below(self, cutoff: float, until: float) -> None:
        """Find the best choice cheaper than `cutoff`, or prove that there is none."""
        while not self._done():
            graph = self._rowed(self.rows)
            try:
                presolve(graph)
                pruned = self._forbid_costlier(graph, cutoff, until)
            except DeadEnd:
                return self._nothing_below(cutoff)
            found, bound = self._solve_program(graph, until)
            if found is None and bound == float("inf"):
                return self._nothing_below(pruned)
            self._raise_bound(min(pruned, bound))
            if found is None:
                return None
            if not self._learn_rows(self._choice(graph.expand(found))):
                return None
        return None

    def _forbid_costlier(self, graph: Graph, cutoff: float, until: float) -> float:
        """What is proven of all that was forbidden in `graph`; inf if that is nothing."""
        if cutoff == float("inf"):
            return cutoff
        accuracy = CONVERGED * max(self.cost - self.bound, self.budget.tolerance)
        bound, pruned = forbid_costlier(graph, cutoff, self.prices.center, accuracy, until)
        self._raise_bound(bound)
        return pruned

    def _solve_program(self, graph: Graph, until: float) -> tuple[dict[int, int] | None, float]:
        if not graph.cost:
            return {}, graph.constant
        if graph.entries() > PROGRAM_LIMIT:
            return None, -float("inf")
        return solve_integers(graph, build_program(graph), None, self.budget.tolerance / 2, until)

    def _nothing_below(self, cutoff: float) -> None:
        """No choice that fits costs less than `cutoff`; none fits at all if that is inf."""
        if cutoff == float("inf") and self.best is None:
            self._look_for_room()  # one step may explain it
            row = int(np.argmax(self.problem.least_profile()))
            choice = least_usage(self.problem, self.base, row, self.budget)[1]
            nodes = live_nodes(self.problem, row, choice)
            raise Infeasible("memory", nodes, self.limit, int(self.problem.steps[row]))
        self._raise_bound(cutoff)
