"""The search within a memory limit where states are offered: rows that say what programs hold, and prices of memory.

Rows say of every step what it holds besides what the search counts.

A judged program of one choice says what there is between the two: transfers in flight, gradients that are there late,
what is written in place. That is given to the search as nodes of one strategy, alive from step to step: so other
choices are counted as if they held as much besides. Where rows count more than the program holds, the limit is raised
by the most that they do, and all other steps are given the difference.

With rows for all layouts in all states a program is too large. Under prices of memory there are no rows: the least cost
of the whole problem bounds every choice that fits, and its choice brings a strategy of every node, a column [Dantzig
and Wolfe 1960]. Of what was brought the best choice that fits is searched with all rows, which is a small problem. What
a byte is worth there, at every row, is the next price:

    prices -> the fastest choice under them -> its strategies -> the best mix within the rows -> prices

Where layers are many, choices in which equal ones are alike are brought first: one node stands for all that are alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from passes.search.judged_choice import Choice
from passes.search.overlapped import CuttingPlanes, Point, peaks
from passes.search.search_space import CostKinds
from passes.search.step_kinds import EXPOSED
from passes.solver.graph import Graph, Ties
from passes.solver.problem import Array, Infeasible, Problem, Solution, Tables
from passes.solver.solve import restricted, several_rows, solve

PARTS = 48
"""Nodes that hold what is given, at most: between steps at which it changes."""
CLOSE, SLACK = 2e-3, 0.3
"""By how much more may be given than a program holds, to change it less often: as shares of its peak, and of what a
step is below that."""

Held = Sequence[tuple[str, int]]
"""(op, bytes alive while it runs), in the order of a program."""


def with_parts(problem: Problem) -> Problem:
    """`problem`, and nodes that will say what is given. Nothing yet."""
    return replace(
        problem,
        node_costs=(*problem.node_costs, *[np.zeros(1)] * PARTS),
        intervals=(*problem.intervals, *[(0, 0)] * PARTS),
        usages=(*problem.usages, *[np.zeros(1)] * PARTS),
    )


def kinds_with_parts(kinds: CostKinds) -> CostKinds:
    return replace(kinds, nodes=(*kinds.nodes, *[EXPOSED] * PARTS))


def held_besides(
    problem: Problem, choice: Sequence[int], names: Sequence[str], held: Held
) -> dict[str, tuple[float, float]]:
    """By name, where a program holds other than its choice is counted: how much more, and by how much more than that
    may be given. names: of the steps of `problem`, as the program calls them."""
    by_name = dict(_by_name(held, set(names)))
    counted, peak = _counted(problem, choice, len(names)), max((nbytes for _, nbytes in held), default=0)
    return {
        name: (by_name[name] - counted[step], max(CLOSE * peak, SLACK * (peak - by_name[name])))
        for step, name in enumerate(names)
        if name in by_name
    }


def _by_name(held: Held, names: set[str]) -> Iterator[tuple[str, int]]:
    """With each op what runs right before it and is no op of the graph: its transfers."""
    most = 0
    for name, nbytes in held:
        most = max(most, nbytes)
        if name in names:
            yield name, most
            most = 0


def _counted(problem: Problem, choice: Sequence[int], steps: int) -> Array:
    changes = np.zeros(steps + 1)
    for (first, last), usage, taken in zip(problem.intervals, problem.usages, choice, strict=False):
        changes[first] += usage[taken]
        changes[min(last, steps)] -= usage[taken]
    return np.cumsum(changes)[:-1]


def corrected(
    problem: Problem, names: Sequence[str], besides: Mapping[str, tuple[float, float]]
) -> tuple[Problem, float]:
    """`problem`, which is one `with_parts`, with what `besides` says; and by how much its limit is to be raised."""
    pieces = _pieces([besides.get(name) for name in names])
    raised = max(0.0, -min((more for _, _, more in pieces), default=0.0))
    own = len(problem.node_costs) - PARTS
    starts = np.array(sorted({first for first, last in problem.intervals[:own] if first < last}))
    row = lambda step: int(starts[max(0, starts.searchsorted(step, "right") - 1)])  # rows stay the same
    lives = [(row(first), row(last) if last < len(names) else last) for first, last, _ in pieces]
    free = PARTS - len(pieces)
    return replace(
        problem,
        intervals=(*problem.intervals[:own], *lives, *[(0, 0)] * free),
        usages=(*problem.usages[:own], *(np.array([p[2] + raised]) for p in pieces), *[np.zeros(1)] * free),
    ), raised


def _pieces(besides: Sequence[tuple[float, float] | None]) -> list[tuple[int, int, float]]:
    """(first step, the step behind the last, bytes more). Steps of which nothing is known are as the one before."""
    known = [(step, *one) for step, one in enumerate(besides) if one is not None]
    times = 1.0
    while known:
        found: list[tuple[int, int, float]] = []
        first, most, allowed = 0, -np.inf, np.inf
        for step, more, may in known:
            if max(most, more) > min(allowed, more + times * may):
                found.append((first, step, most))
                first, most, allowed = step, -np.inf, np.inf
            most, allowed = max(most, more), min(allowed, more + times * may)
        found.append((first, len(besides), most))
        if len(found) <= PARTS:
            return found
        times *= 2.0
    return []


ROUGH = 0.1
"""Relative gap of a search that is to say what programs hold: of many layers only how they are alike is searched."""
FIRST, ROUNDS = 12, 8
"""How often strategies are brought before a choice fits, and for a better one, at most."""
WORTH, PATIENCE = 0.25, 2
"""Of the gap that is asked for, what a round must close to have been worth it, and how many in a row may not be. Of a
rough answer all of it, and none."""
STEEPER = 4.0
"""By what a price rises while nothing fits. What fits is soon brought then, and a mix says what a byte is worth;
between the two prices a problem is the hardest."""
SMALL = 50_000
"""Edge entries of the largest problem that is solved as a whole, with all its rows."""
LEFT = 10.0
"""What may be left open of such a problem, of one that brings strategies and of a mix of them, once small parts of it
were searched, as a share of the least cost without a limit: all. An integer program of all of it takes minutes."""
LARGE, MANY = 1_000_000, 0.5
"""Edge entries beyond which layers are taken alike first, and share of all nodes that may be of kinds of their own."""


@dataclass
class _Patience:
    """most: how many rounds in a row may close little. before: seconds that were open."""

    most: int
    before: float = math.inf
    waited: int = 0

    def ends(self, left: float, worth: float) -> bool:
        """left: seconds that are open after a round; worth: that one must close."""
        self.waited = 0 if self.before - left > worth else self.waited + 1
        self.before = left
        return self.waited >= self.most


@dataclass
class Columns:
    """problem: without a limit, which is of a search. seen: choices of all searches, which bring their strategies.
    prices: that were good last, by row. whole: layers were searched apart as well."""

    problem: Problem
    kinds: CostKinds
    seen: list[Choice] = field(default_factory=list[Choice])
    prices: Mapping[int, float] = field(default_factory=dict[int, float])
    whole: bool = False

    def corrected(self, problem: Problem, kinds: CostKinds) -> Columns:
        """With other rows, and other paths through a step. What is known of choices and prices is where to start."""
        return replace(self, problem=problem, kinds=kinds)

    def worth(self, room: float) -> float:
        """Seconds that a unit more of room would save, by the prices that were the best last."""
        return sum(self.prices.values()) / room

    def find(self, room: float, time_limit: float, gap: float, known: float = math.inf) -> Solution:
        """The best choice that fits, until it is within `gap` of the bound, the bound is `known`, as what is faster is
        looked for, or what is brought makes little better. Raises Infeasible."""
        room = max(room, 1.0)  # what is over it is counted in shares
        problem, deadline = replace(self.problem, limit=room), time.monotonic() + time_limit
        if self._entries <= SMALL:
            search = CuttingPlanes(problem, self.kinds, deadline, True, gap / 2, LEFT)
            for choice in self.seen:
                search.offer(choice)
            patience = _Patience(PATIENCE)
            search.run(lambda best: patience.ends(best.cost - best.lower_bound, WORTH * gap * best.cost))
            self.prices = search.worth
        else:
            search = _Generation(problem, self.kinds, self._ties, self.whole, deadline, gap)
            search.generate(self.seen, self.prices, known)
            self.prices, self.whole = search.prices, search.whole
        self.seen = list(dict.fromkeys([*search.found, search.choice]))
        return search.solution()

    @cached_property
    def _entries(self) -> int:
        return sum(matrix.size for matrix in self.problem.edge_costs)

    @cached_property
    def _ties(self) -> Ties | None:
        """None where layers are few."""
        if self._entries <= LARGE:
            return None
        ties = Ties.among(self.problem)
        return ties if ties.kinds < MANY * len(self.problem.node_costs) else None


class _Generation(CuttingPlanes):
    """ties: by which layers are alike; None: no longer, or never. What is proven while there are any is of layers that
    are alike: enough, once the whole was searched, and where a rough answer is. prices: of the last mix that has
    some."""

    def __init__(
        self,
        problem: Problem,
        kinds: CostKinds,
        ties: Ties | None,
        whole: bool,
        deadline: float,
        relative_gap: float,
    ) -> None:
        super().__init__(problem, kinds, deadline, rows_inside=False, relative_gap=relative_gap, enough=LEFT)
        self.ties, self.whole = ties, whole
        self.rough = ties is not None and relative_gap >= ROUGH
        self.prices: Mapping[int, float] = {}

    def generate(self, seen: Iterable[Choice], prices: Mapping[int, float], known: float) -> None:
        """seen, prices: of searches before. Raises Infeasible if no choice fits, or none was found."""
        for choice in seen:
            self.add(choice)
        self.known, self.prices = len(self.found), prices
        if prices:
            self._brings()
        if not self.choice:
            self._offer_mix(list(dict.fromkeys(self.found)), self._mix_seconds())
        self._until_one_fits()
        patience = _Patience(1 if self.rough else PATIENCE, self._open())
        for _ in range(ROUNDS):
            # Share of the whole gap that a mix may leave: while strategies are brought, where prices
            # matter, and of the last.
            self._mixed(0.5)
            if self._ends(known) or not self._brings() or self._ends(known):
                break
            worth = (1.0 if self.rough else WORTH) * self.relative_gap * self.cost
            if patience.ends(self._open(), worth):
                break
        if self.ties is not None and not self.rough and not self._ends(known):
            self.ties, self.bound, self.whole = None, -math.inf, True
            self._brings()
        if not self.rough and not self._ends(known):
            self._mixed(0.2)

    def _open(self) -> float:
        """Seconds that are to be closed: of a rough answer, which proves nothing, all of them."""
        return self.cost if self.rough else self.cost - self.bound

    def _ends(self, known: float) -> bool:
        says_enough = self.ties is None or self.whole or self.rough
        proven = says_enough and (self._gap() <= self.relative_gap or self.bound >= known)
        return proven or time.monotonic() >= self.deadline

    def _until_one_fits(self) -> None:
        """First where planes are highest, which says what memory is worth; then for more and more."""
        point = self._next() if self.found and not self.choice else self.bound_at
        for number in range(FIRST):
            if self.choice or point is None or time.monotonic() >= self.deadline:
                break
            self._solve_at(point)
            if number > 2 and not self.choice:
                self.refuse_if_none_fits()
            point = self._next() if number == 0 else self._raised(point)
        if not self.choice and time.monotonic() >= self.deadline:
            raise Infeasible("time")
        if not self.choice:
            raise several_rows(self.problem, Graph.of(self.problem, Tables()), self.deadline)

    def _raised(self, point: Point) -> Point:
        """Where a byte costs more wherever the last choice holds too many, and at the least as much as half of what it
        costs anywhere."""
        least = 0.5 * max(point.prices.values(), default=self.cap)
        over = {row for rows in peaks(self.planes[-1].over) for row in rows}
        raised = {row: STEEPER * max(point.prices.get(row, 0.0), least) for row in sorted(over)}
        return replace(point, prices={**point.prices, **raised})

    def _brings(self) -> bool:
        """Whether the whole problem, solved at the last prices and where planes are highest, brings a choice that was
        not known."""
        known = len(set(self.found))
        if self.prices:
            self._solve_at(replace(self.bound_at, prices=self.prices))
        point = self._next()
        if point is not None and time.monotonic() < self.deadline:
            self._solve_at(point)
        return len(set(self.found)) > known

    def _mixed(self, share: float) -> None:
        """Takes the best choice of what was brought, with all rows, and what a byte is worth there."""
        keep = [sorted(set(some)) for some in zip(*self.found, self.choice, strict=True)]
        small = restricted(self._weighted(self.bound_at), dict(enumerate(keep)))
        gap = max(self.relative_gap / 2, share * min(self._gap(), 1.0))
        warm = [kept.index(a) for kept, a in zip(keep, self.choice, strict=True)]
        seconds = self._mix_seconds() if self.rough else self._left()
        # How good it is says nothing of the whole problem, so that it is not proven.
        found = solve(small, time_limit=seconds, relative_gap=gap, warm=warm, enough=LEFT)
        if found.prices:
            self.prices = {row: price * (self.problem.limit or 0.0) for row, price in found.prices.items()}
        self.add(tuple(kept[a] for kept, a in zip(keep, found.choice, strict=True)))

    def _mix(self) -> None:
        """With all rows, where one fits: `_mixed`."""

    def _solved(self, inner: Problem, gap: float) -> Solution:
        if self.ties is None:
            return super()._solved(inner, gap)
        found = solve(self.ties.problem(inner), time_limit=self._left(), relative_gap=gap)
        return replace(found, choice=self.ties.expanded(found.choice))
