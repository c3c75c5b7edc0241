"""The search within a memory limit where states are offered: few strategies of every node, and what a price brings.

Most of what a limit asks for are states, not layouts. So a problem with the layouts of a known plan, and all states, is
solved with its memory rows; it is small. What a byte is worth there, at every row, is a price for the whole problem:
its least cost under prices bounds every choice that fits, and where it is lower than what was found, its strategies
join the small problem [Dantzig and Wolfe 1960].

    least cost + prices . (use - room)        is known for one room, so for all rooms
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from passes.search.cost_kinds import CostKinds
from passes.search.overlapped import CuttingPlanes, TiedPlanes
from passes.search.planes import Point, charged
from passes.solver.alike import Ties
from passes.solver.explain_infeasible import least_usage, live_nodes
from passes.solver.graph import Graph
from passes.solver.problem import Infeasible, Problem, Solution
from passes.solver.solve import ROUNDING, restricted, solve
from passes.solver.tables import Tables

ROUNDS = 6
"""How often strategies may join before a problem without any choice that fits is solved as a whole."""
PROVING = 3
"""How often strategies may join for a better choice."""
WORTH = 1e-3
"""Share of the cost by which that must be better for another time."""
SMALL = 50_000
"""Edge entries of the largest problem that is solved as a whole, with all its rows."""
LARGE = 2_000_000
"""Edge entries beyond which a first choice of the small problem takes long, and its layouts are far from what fits."""
MANY, TIED = 0.5, 0.75
"""Share of all nodes that may be of kinds of their own for layers to be taken alike first, and of the time for that."""
EXPENSIVE = (1.0, 30.0)
"""Prices of a row where nothing fits that bring choices of little memory, as shares of the cost for all of the room."""


_Fitting = tuple[tuple[int, ...], Point]
"""A choice that fits, and where the bound was highest."""


@dataclass(frozen=True)
class _Bound:
    """No choice that fits a room of r takes less than base - slope * r."""

    base: float
    slope: float


@dataclass
class Columns:
    """problem: without a limit, which is of a search. keep: per node the positions of the strategies that are in the
    small problem, one at least; more join with every search."""

    problem: Problem
    kinds: CostKinds
    keep: list[set[int]]
    _bounds: list[_Bound] = field(default_factory=list)
    _known: tuple[int, ...] | None = None
    _shares: Point | None = None
    _worth: Point | None = None
    _last: Infeasible = field(default_factory=lambda: Infeasible("time"))
    _tied: dict[float, _Fitting | None] = field(default_factory=dict[float, _Fitting | None])
    _seen: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def corrected(self, problem: Problem, kinds: CostKinds) -> Columns:
        """With other rows, and other paths through a step. What is known of strategies and choices stays, of bounds
        nothing."""
        return replace(self, problem=problem, kinds=kinds, _bounds=[], _shares=None, _tied={})

    def worth(self, room: float) -> float:
        """Seconds that a unit more of room would save, by the prices that were the best last."""
        return sum(self._worth.prices.values()) / room if self._worth is not None else 0.0

    def fitting(self, room: float, time_limit: float, gap: float) -> Solution:
        """The best choice that fits of those in which equal layers are alike, where there are many; else of the small
        problem, with what is known of the whole. Raises Infeasible."""
        deadline = time.monotonic() + time_limit
        choice, _ = self._alike(room, deadline, gap) or self._small(room, deadline, gap)
        return self._solution(choice, room)

    def proven(self, room: float, time_limit: float, gap: float, known: float = math.inf) -> Solution:
        """With strategies that prices bring, until it is within `gap` of the bound or they bring nothing more, or the
        bound is `known`: what is faster is looked for. A small problem is solved as a whole, to the end. Raises
        Infeasible."""
        deadline = time.monotonic() + time_limit
        if self._is_small:
            return self._whole(room, deadline, 0.0).solution()
        alike = self._alike(room, deadline, gap)
        if self._worth is not None and (alike is not None or known < math.inf):
            # Prices that were good before, at another room or overlap, may say at once that nothing is as fast. What
            # they bring is worth having.
            self._priced(self._worth, room, deadline, gap)
            if self._known is not None and self._fits(self._known, room):
                found = self._solution(self._known, room)
                if self._bound(room) >= known or (alike is not None and found.gap <= gap):
                    return found
        choice, point = self._small(room, deadline, gap)
        found = self._solution(choice, room)
        for _ in range(PROVING):
            if found.gap <= max(gap, ROUNDING) or time.monotonic() >= deadline:
                break
            brought = self._priced(point, room, deadline, gap)
            if not brought or self._bound(room) >= known:
                return self._solution(choice, room)
            before, (choice, point) = found.cost, self._small(room, deadline, gap)
            found = self._solution(choice, room)
            if found.cost > before * (1.0 - WORTH):
                break
        return found

    def _alike(self, room: float, deadline: float, gap: float) -> _Fitting | None:
        """None where layers are few, or no such choice fits."""
        if not self._layers_are_many:
            return None
        if room not in self._tied:
            until = time.monotonic() + TIED * (deadline - time.monotonic())
            search = TiedPlanes(replace(self.problem, limit=room), self.kinds, self._ties, until, gap)
            for choice in self._seen:
                search.add(choice)
            self._tied[room] = None
            with suppress(Infeasible):
                search.run()
                self._add(search.choice)
                self._tied[room] = search.choice, search.bound_at
                self._worth = search.bound_at
            self._seen = list(dict.fromkeys(search.found))
        found = self._tied[room]
        if found is None:
            return None
        self._offer(found[0], room)
        assert self._known is not None
        return self._known, found[1]

    @property
    def _layers_are_many(self) -> bool:
        return self._entries > LARGE and self._ties.kinds < MANY * len(self.problem.node_costs)

    @cached_property
    def _ties(self) -> Ties:
        return Ties.among(self.problem)

    def _small(self, room: float, deadline: float, gap: float) -> _Fitting:
        for _ in range(ROUNDS):
            keep = [sorted(kept) for kept in self.keep]
            small = restricted(replace(self.problem, limit=room), dict(enumerate(keep)))
            search = CuttingPlanes(small, self.kinds, deadline, True, gap / 2)
            search.bound_at = self._shares or search.bound_at
            if self._known is not None:
                search.offer([kept.index(a) for kept, a in zip(keep, self._known, strict=True)])
            try:
                search.run()
            except Infeasible as reason:
                if self._join(reason, room, deadline):
                    continue
                break
            self._known = tuple(kept[a] for kept, a in zip(keep, search.choice, strict=True))
            self._shares = search.bound_at
            self._worth = replace(search.bound_at, prices=search.worth)
            return self._known, self._worth
        # In large problems, what no mix of the leanest choices fits is taken to have no plan: a search with all rows
        # would not end.
        if not self._is_small:
            raise self._last
        search = self._whole(room, deadline, gap)
        return search.choice, replace(search.bound_at, prices=search.worth)

    @property
    def _is_small(self) -> bool:
        return self._entries <= SMALL

    @cached_property
    def _entries(self) -> int:
        return sum(matrix.size for matrix in self.problem.edge_costs)

    def _whole(self, room: float, deadline: float, gap: float) -> CuttingPlanes:
        """The whole problem with its rows. Raises Infeasible."""
        search = CuttingPlanes(replace(self.problem, limit=room), self.kinds, deadline, True, gap)
        if self._known is not None:
            search.offer(self._known)
        search.run()
        self._add(search.choice)
        self._known = search.choice
        return search

    def _join(self, reason: Infeasible, room: float, deadline: float) -> bool:
        """Strategies of choices with less memory; False if all are known. Raises Infeasible if none would fit."""
        self._last = reason
        first = Point.first(self.kinds.paths)
        if reason.kind == "time":
            raise reason
        if reason.kind == "edges":
            return self._priced(first, room, deadline, 0.0)
        problem = replace(self.problem, limit=room)
        row = int(problem.steps.searchsorted(reason.step))
        usage, choice = least_usage(problem, Graph.of(problem, Tables()), row, deadline)
        if usage > room:
            raise Infeasible("memory", live_nodes(problem, row, choice), usage, reason.step)
        new = self._add(choice)
        self._offer(choice, room)
        scale = self.kinds.seconds(self.problem, choice)
        for price in EXPENSIVE:
            new |= self._priced(replace(first, prices={row: price * scale}), room, deadline, 0.01)
        return new

    def _priced(self, point: Point, room: float, deadline: float, gap: float) -> bool:
        """The whole problem under prices: a bound for all rooms, and strategies that join; False if all are known."""
        weighted = self.kinds.weighted(replace(self.problem, limit=room), point.weights(self.kinds.paths))
        left = max(deadline - time.monotonic(), 1.0)
        inner = charged(weighted, point.prices)
        found = solve(inner, time_limit=left, relative_gap=gap / 2, warm=self._known)
        self._bounds.append(_Bound(found.lower_bound, sum(point.prices.values()) / room))
        self._offer(found.choice, room)
        return self._add(found.choice)

    def _offer(self, choice: Sequence[int], room: float) -> None:
        """A choice that fits, to start from: of a large problem the rows alone may find none in time."""
        problem = replace(self.problem, limit=room)
        fitting = [one for one in (self._known, choice) if one is not None and problem.fits(one)]
        if fitting:
            best = min(fitting, key=lambda one: self.kinds.seconds(problem, one))
            self._known = tuple(int(a) for a in best)

    def _fits(self, choice: Sequence[int], room: float) -> bool:
        return replace(self.problem, limit=room).fits(choice)

    def _add(self, choice: Sequence[int]) -> bool:
        new = [a not in kept for kept, a in zip(self.keep, choice, strict=True)]
        for kept, a in zip(self.keep, choice, strict=True):
            kept.add(int(a))
        return any(new)

    def _bound(self, room: float) -> float:
        return max((b.base - b.slope * room for b in self._bounds), default=0.0)

    def _solution(self, choice: tuple[int, ...], room: float) -> Solution:
        cost = self.kinds.seconds(self.problem, choice)
        bound = min(cost, self._bound(room))
        gap = (cost - bound) / max(abs(cost), 1e-300)
        return Solution(choice, cost, bound, gap, "optimal" if gap <= ROUNDING else "feasible")
