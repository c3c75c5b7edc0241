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

import numpy as np

from .core import Budget, solve_graph
from .dual import Messages, ascend, lower_bound, prune, zero_messages
from .graph import DeadEnd, Graph
from .lagrange import Prices, priced, violated_rows
from .local_search import Search
from .marginal import build_program, relax, solve_integers
from .presolve import presolve
from .problem import Array, Infeasible, Problem

__all__ = ["MemorySearch"]

PRICE_SHARE, PRICE_TRIES = 0.4, 60
"""Share of the time, and number of searches, that the prices may take."""
CUTOFFS = (0.02, 0.1, 0.3, 0.6, 1.0)
"""Cutoffs tried, as shares of the way from the bound to the best cost."""
PROGRAM_LIMIT = 3_000_000
"""Edge entries of the largest program that is handed to HiGHS."""
RELAXATION_LIMIT = 1_000_000
"""Edge entries of the largest relaxation that is solved for its dual values."""
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
        self._note({}, first, bound)

    def solve(self) -> None:
        """Fill `best`, `cost` and `bound`. Raises Infeasible."""
        self._improve_prices()
        if self.best is None:
            self._look_for_room()
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
        self.prices.add(prices, bound, self.problem.cost(choice), profile)
        self.rows.update(violated_rows(self.problem, profile, ROWS_AT_ONCE))
        self._raise_bound(bound)
        self._repair(choice, max(prices.values(), default=0.0))

    def _repair(self, choice: list[int], price: float) -> None:
        search = Search(self.problem, self.base, choice)
        scale = abs(self.problem.cost(choice)) / self.limit if self.limit > 0 else 1.0
        if search.repair(max(price, 1e-3 * scale), self.budget.deadline):
            search.descend(float("inf"), self.budget.deadline)
            self._offer(search.choice)

    def _choice(self, found: dict[int, int]) -> list[int]:
        return [found[node] for node in range(len(self.problem.node_costs))]

    def _improve_prices(self) -> None:
        start = time.monotonic()
        until = start + PRICE_SHARE * max(0.0, self.budget.deadline - start)
        for _ in range(PRICE_TRIES):
            prices, most = self.prices.propose()
            room = max(self.budget.tolerance, 1e-6 * abs(most))
            if self._done() or time.monotonic() > until or most - self.prices.best <= room:
                return
            rowed = self.base.copy()
            rowed.add_rows(self.problem, (row for row, price in prices.items() if price > 0))
            accuracy = max(self.budget.tolerance, 0.01 * (most - self.prices.best))
            graph = priced(rowed, prices)
            found = solve_graph(graph, Budget(until, accuracy))
            self._note(prices, self._choice(found.choice), found.bound)

    def _look_for_room(self) -> None:
        """The least usage at the fullest steps: proves that nothing fits, or leads to a choice that does."""
        least = self.problem.least_profile()
        fullest = sorted(range(len(least)), key=lambda row: (-least[row], row))[:ROWS_AT_ONCE]
        for row in (*fullest, *sorted(self.rows - set(fullest))):
            usage, choice = least_usage(self.problem, self.base, row, self.budget)
            if usage > self.limit:
                raise Infeasible("memory", live_nodes(self.problem, row, choice), usage, int(self.problem.steps[row]))
            self._repair(choice, 1.0)
            if self.best is not None:
                return

    def _close_gap(self) -> None:
        for share in CUTOFFS:
            if self._done():
                return
            room = self.cost - self.budget.tolerance / 2 - self.bound
            left = self.budget.deadline - time.monotonic()
            until = self.budget.deadline if share == 1.0 else time.monotonic() + 0.4 * left
            self._search_below(self.bound + share * room, until)

    def _search_below(self, cutoff: float, until: float) -> None:
        """Find the best choice cheaper than `cutoff`, or prove that there is none."""
        while not self._done():
            graph = self.base.copy()
            graph.add_rows(self.problem, self.rows)
            try:
                presolve(graph)
                pruned = self._prune(graph, cutoff, until)
            except DeadEnd:
                return self._nothing_below(cutoff)
            found, bound = self._solve_program(graph, until)
            if found is None and bound == float("inf"):
                return self._nothing_below(pruned)
            self._raise_bound(min(pruned, bound))
            if found is None:
                return None
            choice = self._choice(graph.expand(found))
            new = set(violated_rows(self.problem, self.problem.profile(choice), ROWS_AT_ONCE)) - self.rows
            if self._offer(choice) or not new:
                return self._repair(choice, 0.0)
            self.rows |= new
        return None

    def _solve_program(self, graph: Graph, until: float) -> tuple[dict[int, int] | None, float]:
        if not graph.cost:
            return {}, graph.constant
        if graph.entries() > PROGRAM_LIMIT:
            return None, -float("inf")
        return solve_integers(graph, build_program(graph), None, self.budget.tolerance / 2, until)

    def _nothing_below(self, cutoff: float) -> None:
        if cutoff == float("inf"):
            row = int(np.argmax(self.problem.least_profile()))
            choice = least_usage(self.problem, self.base, row, self.budget)[1]
            nodes = live_nodes(self.problem, row, choice)
            raise Infeasible("memory", nodes, self.limit, int(self.problem.steps[row]))
        self._raise_bound(cutoff)

    def _prune(self, graph: Graph, cutoff: float, until: float) -> float:
        """Forbid in `graph` what is proven to cost `cutoff` or more, and reduce again.

        By messages on its priced copy, then by the dual values of its relaxation. Returns what is proven of all that
        went, inf if nothing did.
        """
        pruned = float("inf")
        for bounding in (self._by_messages, self._by_relaxation) if cutoff < float("inf") else ():
            for _ in range(4):
                before = graph.entries()
                answer = bounding(graph, until)
                if answer is None:
                    break
                copy, messages = answer
                bound = lower_bound(copy, messages)
                self._raise_bound(min(cutoff, pruned, bound))
                least = prune(copy, messages, bound, cutoff)
                if least == float("inf"):
                    break
                pruned = min(pruned, least)
                _forbid_same(graph, copy)
                presolve(graph)
                if graph.entries() > 0.9 * before:
                    break
        return pruned

    def _by_messages(self, graph: Graph, until: float) -> tuple[Graph, Messages] | None:
        copy = priced(graph, self.prices.center)
        messages = zero_messages(copy)
        ascend(copy, messages, 30, until)
        return copy, messages

    def _by_relaxation(self, graph: Graph, until: float) -> tuple[Graph, Messages] | None:
        if not graph.cost or graph.entries() > RELAXATION_LIMIT:
            return None
        relaxed = relax(graph, build_program(graph), until)
        return relaxed and (priced(graph, relaxed.prices), relaxed.messages)


def _forbid_same(graph: Graph, pruned: Graph) -> None:
    """Forbid in `graph` what is forbidden in its priced copy."""
    for node, vector in pruned.cost.items():
        graph.forbid(node, ~np.isfinite(vector))
        for other, matrix in pruned.adjacent[node].items():
            if node < other:
                graph.set_edge(node, other, matrix)


def least_usage(problem: Problem, base: Graph, row: int, budget: Budget) -> tuple[float, list[int]]:
    """A lower bound on the usage at `row` of any choice, and a choice that uses about as little."""
    count = len(problem.node_costs)
    cost: list[Array] = []
    for node in range(count):
        first, last = problem.live.get(node, (0, 0))
        used = np.asarray(problem.usages[node], dtype=np.float64) if first <= row < last else 0.0
        cost.append(np.where(np.isfinite(problem.node_costs[node]), used, np.inf))
    graph = base.copy()
    zeros: dict[int, Array] = {}
    for node in range(count):
        graph.cost[node] = graph.tables.intern(cost[node])
        for other, matrix in base.adjacent[node].items():
            if node < other:
                if id(matrix) not in zeros:
                    zeros[id(matrix)] = graph.tables.intern(np.where(np.isfinite(matrix), 0.0, np.inf))
                graph.set_edge(node, other, zeros[id(matrix)])
    assert problem.limit is not None
    found = solve_graph(graph, Budget(budget.deadline, 1e-9 * problem.limit))
    return found.bound, [found.choice[node] for node in range(count)]


def live_nodes(problem: Problem, row: int, choice: list[int]) -> list[int]:
    """Nodes live at `row` that use something there in `choice`, largest usage first."""
    live = [node for node, (first, last) in problem.live.items() if first <= row < last]
    used = {node: float(problem.usages[node][choice[node]]) for node in live}
    return sorted((node for node in live if used[node] > 0), key=lambda node: (-used[node], node))
