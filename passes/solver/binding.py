"""Least cost within memory rows, by the program in marginal form: for graphs that are small enough for HiGHS.

The relaxation first, with only those rows that its answer overfills; its dual values are prices of memory and
messages, which forbid what is proven to cost too much. Integers last, again with the rows that are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from .core import Budget, solve_presolved
from .dual import lower_bound, prune
from .graph import DeadEnd, Graph
from .lagrange import Bound, forbid_same, priced
from .marginal import Relaxation, Relaxed, solve_integers
from .marginal_program import build_program
from .presolve import presolve
from .problem import Infeasible
from .usage_rows import Row, Rows

__all__ = ["Answer", "solve_rows"]

ROUNDS = 60
ROWS_AT_ONCE = 24
VIOLATED = 1e-9
"""Share of a row's size above which the relaxation overfills it."""
WORTHWHILE = 0.1
"""Share of the entries that a pruning must remove for another relaxation."""

Offer = Callable[[Graph, Rows, dict[int, int]], float]
"""Take a choice of what is left of a graph, whether it fits or not; the least cost found so far."""


@dataclass(frozen=True)
class Answer:
    """bound: no choice that costs less than the cutoff costs less than this.
    closed: the search ended by itself: nothing better than what was offered is left, but for the tolerance.
    prices: of memory by the graph's rows, in the first relaxation: what a byte of room is worth."""

    bound: float
    closed: bool
    prices: Mapping[int, float] = field(default_factory=dict[int, float])


def solve_rows(graph: Graph, cutoff: float, budget: Budget, offer: Offer) -> Answer:
    """Search `graph`, which is consumed, for choices that fit and cost less than `cutoff`; each is offered."""
    prices: dict[int, float] = {}
    return replace(_solve_rows(graph, cutoff, budget, offer, prices), prices=prices)


def _solve_rows(
    graph: Graph, cutoff: float, budget: Budget, offer: Offer, prices: dict[int, float]
) -> Answer:
    bound, pruned = -float("inf"), cutoff
    try:
        presolve(graph, budget.deadline)
        while True:
            rows = Rows.of(graph)
            if not len(rows.slack):
                return _without_rows(graph, rows, pruned, budget, offer)
            memory: dict[int, Row] = {}
            relaxed = _relax(graph, rows, memory, budget)
            if relaxed is None:
                return Answer(bound, False)
            found = bound_of(graph, rows, relaxed)
            prices.update({} if prices else rows.of_graph(found.prices))
            bound = max(bound, min(found.bound, pruned))
            cutoff = min(cutoff, offer(graph, rows, relaxed.choice))
            if cutoff - bound <= budget.tolerance:
                return Answer(min(bound, cutoff), True)
            before = graph.entries()
            least = prune(found.graph, found.messages, found.bound, cutoff - budget.tolerance / 2)
            pruned = min(pruned, least, cutoff)
            forbid_same(graph, found.graph)
            presolve(graph, budget.deadline)
            # No edge may be left at all: then there is nothing to gain here.
            if graph.entries() >= (1 - WORTHWHILE) * before or budget.spent:
                break
        rows = Rows.of(graph)
        if not len(rows.slack):  # pruning has left none that binds
            return _without_rows(graph, rows, pruned, budget, offer)
        return _integers(graph, rows, bound, min(pruned, cutoff), budget, offer)
    except DeadEnd:
        return Answer(pruned, True)


def bound_of(graph: Graph, rows: Rows, relaxed: Relaxed) -> Bound:
    prices = np.zeros(len(rows.slack))
    for row, price in relaxed.prices.items():
        prices[row] = price
    copy = priced(graph, rows, prices)
    return Bound(copy, relaxed.messages, prices, lower_bound(copy, relaxed.messages))


def _without_rows(graph: Graph, rows: Rows, pruned: float, budget: Budget, offer: Offer) -> Answer:
    rest = graph.copy()
    try:
        found = solve_presolved(rest, budget)
    except Infeasible:
        return Answer(-float("inf"), False)
    cost = offer(graph, rows, found.choice)
    bound = min(pruned, graph.constant + found.bound)
    return Answer(bound, min(cost, pruned) - bound <= budget.tolerance)


def _relax(graph: Graph, rows: Rows, memory: dict[int, Row], budget: Budget) -> Relaxed | None:
    """The relaxation with all rows that it needs, which are added to `memory`; None if time ran out."""
    tolerance = VIOLATED * float(np.abs(rows.slack).max())
    program, answer = Relaxation(graph), None
    for _ in range(ROUNDS):
        better = program.solve(budget.deadline)
        if better is None:
            break
        answer = better
        over = rows.expected(answer.shares) - rows.slack
        new = [row for row in rows.tops(over, tolerance, ROWS_AT_ONCE) if row not in memory]
        if not new:
            break
        for row in new:
            memory[row] = rows.single(row)
            program.add(row, memory[row])
    return answer


def _integers(graph: Graph, rows: Rows, bound: float, cutoff: float, budget: Budget, offer: Offer) -> Answer:
    if not graph.cost:
        offer(graph, rows, {})
        return Answer(min(cutoff, graph.constant), True)
    memory: dict[int, Row] = {}
    _relax(graph, rows, memory, budget)
    while time.monotonic() < budget.deadline:
        program = build_program(graph, memory)
        choice, least = solve_integers(graph, program, None, budget.tolerance / 2, budget.deadline)
        bound = max(bound, min(least, cutoff))
        if choice is None:
            return Answer(bound, least == float("inf"))
        cost = offer(graph, rows, choice)
        missing = [row for row in rows.violated(choice, ROWS_AT_ONCE) if row not in memory]
        if not missing:
            return Answer(bound, min(cost, cutoff) - bound <= budget.tolerance)
        if cost - bound <= budget.tolerance:
            return Answer(bound, True)
        memory.update((row, rows.single(row)) for row in missing)
    return Answer(bound, False)
