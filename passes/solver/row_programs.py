"""The search within a memory limit by HiGHS's programs, of what prices of memory have left.

The relaxation comes first, with only those rows that its answer overfills; its dual values are prices of memory and
messages, which forbid what is proven to cost too much. Small parts of what is left are searched on the way, which
bring choices that forbid more. Integers of all of it last, again with the rows that are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from .branches import prune
from .core import Budget, solve_presolved, weighted
from .graph import DeadEnd, Graph
from .marginal import Relaxation, Relaxed
from .passing import Messages, bound_of
from .presolve import presolve
from .problem import Array, Infeasible
from .usage import Row, Rows


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
    for node, extra in rows.priced(prices).items():
        if node in rows.usages:
            moved.cost[node] = graph.cost[node] + extra
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


ROWS_AT_ONCE = 24
WORTHWHILE = 0.1
"""Share of the entries that a pruning must remove for another relaxation."""

NEAR, SMALL_PART, HALF = 0.1, 5_000, 0.5
"""Share of the gap within which a better choice is looked for before all are; edge entries of the largest part of a
graph that is searched so; and their share of the graph's."""
TINY = 1_000
"""Edge entries of the largest graph whose program of integers takes no longer than its relaxation: always searched."""

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
            rows = graph.rows()
            if not len(rows.slack):
                return _without_rows(graph, rows, pruned, budget, offer)
            memory: dict[int, Row] = {}
            relaxed = _relax(graph, rows, memory, budget)
            if relaxed is None:
                return Answer(bound, False)
            found = _priced_bound(graph, rows, relaxed)
            prices.update({} if prices else rows.of_graph(found.prices))
            bound = max(bound, min(found.bound, pruned))
            cutoff = min(cutoff, offer(graph, rows, relaxed.choice))
            for part in (_weighted(graph, relaxed), _near(graph, found)):
                if cutoff - bound > budget.tolerance:
                    cutoff = min(cutoff, _part(graph, rows, part, cutoff, budget, offer))
            enough = budget.enough if graph.entries() > TINY else 0.0
            if cutoff - bound <= max(budget.tolerance, enough):
                return Answer(min(bound, cutoff), cutoff - bound <= budget.tolerance)
            before = graph.entries()
            least = prune(found.graph, found.messages, found.bound, cutoff - budget.tolerance / 2)
            pruned = min(pruned, least, cutoff)
            forbid_same(graph, found.graph)
            presolve(graph, budget.deadline)
            # No edge may be left at all: then there is nothing to gain here.
            if graph.entries() >= (1 - WORTHWHILE) * before or budget.spent:
                break
        return _integers(graph, bound, min(pruned, cutoff), budget, offer)
    except DeadEnd:
        return Answer(pruned, True)


_Part = Callable[[float, float], Graph]
"""What is left of a graph without some choices, with no constant, by the least cost known and the deadline. Raises
DeadEnd."""


def _weighted(graph: Graph, relaxed: Relaxed) -> _Part:
    return lambda _, deadline: weighted(graph, relaxed, deadline)


def _near(graph: Graph, found: Bound) -> _Part:
    """What the bound leaves if a choice is asked for that is far nearer to it than the best."""

    def part(cutoff: float, deadline: float) -> Graph:
        copy, left = found.graph.twin(), graph.copy()
        prune(copy, found.messages, found.bound, found.bound + NEAR * (cutoff - found.bound))
        forbid_same(left, copy)
        presolve(left, deadline)
        return left

    return part


def _part(graph: Graph, rows: Rows, part: _Part, cutoff: float, budget: Budget, offer: Offer) -> float:
    """The least cost that is known once a part of `graph` was searched, where integer programs are small."""
    least = cutoff

    def offered(_: Graph, __: Rows, choice: dict[int, int]) -> float:
        nonlocal least
        least = min(least, offer(graph, rows, left.expand(choice)))
        return least - graph.constant

    try:
        left = part(cutoff, budget.deadline)
        if left.entries() <= min(SMALL_PART, HALF * graph.entries()):
            _integers(left, -float("inf"), cutoff - graph.constant, budget, offered)
    except DeadEnd:
        pass
    return least


def _priced_bound(graph: Graph, rows: Rows, relaxed: Relaxed) -> Bound:
    prices = np.zeros(len(rows.slack))
    for row, price in relaxed.prices.items():
        prices[row] = price
    copy = priced(graph, rows, prices)
    return Bound(copy, relaxed.messages, prices, bound_of(copy, relaxed.messages))


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
    # Share of a row's size above which the relaxation overfills it.
    tolerance = 1e-9 * float(np.abs(rows.slack).max())
    program, answer = Relaxation(graph), None
    for _ in range(60):
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


def _integers(graph: Graph, bound: float, cutoff: float, budget: Budget, offer: Offer) -> Answer:
    rows = graph.rows()
    if not graph.cost:
        offer(graph, rows, {})
        return Answer(min(cutoff, graph.constant), True)
    if not len(rows.slack):  # pruning has left none that binds
        return _without_rows(graph, rows, cutoff, budget, offer)
    memory: dict[int, Row] = {}
    _relax(graph, rows, memory, budget)
    while time.monotonic() < budget.deadline:
        program = Relaxation(graph, integers=True)
        for row, of_row in memory.items():
            program.add(row, of_row)
        choice, least = program.solve_integers(budget.tolerance / 2, budget.deadline)
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
