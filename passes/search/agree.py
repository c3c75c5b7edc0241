"""Search until the objective and the timeline agree on what a step takes.

The objective does not place every collective: it says of parts of a phase what may hide (`step_kinds`). The timeline
of the program that would run says what does. So the plan that the search finds is judged by its timeline. Where the
two differ, plans found as if less or more could hide are judged as well; the overlap of each phase is corrected until
the objective of the best plan is its timeline; and the search runs again, until it finds no faster one. Its last
bound is one under the overlap that the best plan has. Of all plans judged the fastest on the timeline is taken; of
those that take equally long, the one that holds the fewest bytes at its peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from passes.layout.assignment import Assignment
from passes.search.lighter import lighter
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import SearchSpace
from passes.search.step_kinds import Overlap, corrected, phase_seconds
from passes.solver.problem import Array, Solution
from passes.solver.solve import ROUNDING

__all__ = ["AWAITED", "Agreed", "Judge", "Judgement", "agreed", "first_overlaps"]


class Judgement(NamedTuple):
    """phases: seconds of the forward, the backward and of what follows, on the timeline of the program. peak_nbytes:
    the most that is alive in it."""

    phases: Sequence[float]
    peak_nbytes: int


Judge = Callable[[Assignment], Judgement]

AWAITED, MORE_AWAITED = 0.1, 0.25
"""Shares of what is awaited in the backward that are taken to hide behind fillers: before a timeline says how much, and
for a rival."""
AGREES = 1e-2
"""Share of a step by which objective and timeline may differ without another search."""
AGAIN_EDGES = 3000
"""Edges of the largest problem that is searched again. In larger ones the objective is made the timeline's by a
constant for each phase: searches take seconds to minutes there, and few found a faster plan, by 1 % at most."""
AGAIN_GAP = 2e-3
"""Relative gap of all searches but the first, which are about what a correction is worth."""


@dataclass(frozen=True)
class Agreed:
    """assignment, choice: of the fastest plan judged. seconds: its objective under `overlaps`; lower_bound: no plan has
    less under them. rivals: what else was judged, the fastest first, each under an overlap that makes its objective its
    timeline; the bound is the same."""

    assignment: Assignment
    choice: tuple[int, ...]
    seconds: float
    lower_bound: float
    status: str
    overlaps: tuple[Overlap, ...]
    rivals: tuple[Agreed, ...] = ()


@dataclass(frozen=True)
class _Judged:
    """totals: its seconds by kind. phases, peak_nbytes: of the timeline and its program."""

    assignment: Assignment
    choice: tuple[int, ...]
    totals: Array
    phases: tuple[float, ...]
    peak_nbytes: int

    @property
    def seconds(self) -> float:
        return sum(self.phases)

    def precedes(self, other: _Judged) -> bool:
        """Faster; or as fast, but for rounding, and smaller."""
        if abs(self.seconds - other.seconds) <= ROUNDING * other.seconds:
            return self.peak_nbytes < other.peak_nbytes
        return self.seconds < other.seconds

    def counted(self, overlaps: Sequence[Overlap]) -> float:
        """The objective."""
        return sum(phase_seconds(self.totals, overlaps)) + float(self.totals[-1])

    def agreed(self, overlaps: tuple[Overlap, ...], bound: float) -> Agreed:
        """A rival's, with a bound that another plan was found under."""
        seconds = self.counted(overlaps)
        return Agreed(self.assignment, self.choice, seconds, min(bound, seconds), "feasible", overlaps)

    def corrected(self, overlaps: Sequence[Overlap]) -> tuple[Overlap, ...]:
        """Under which the objective is the timeline. What has no kind but is not the update is counted besides: of the
        forward, whose outputs the caller waits for."""
        return corrected(self.totals, overlaps, self._wanted(len(overlaps)))

    def shifted(self, overlaps: Sequence[Overlap]) -> tuple[Overlap, ...]:
        """The same by constants alone: the plan that is found under them is the one found before."""
        counted = phase_seconds(self.totals, overlaps)
        wanted = self._wanted(len(overlaps))
        return tuple(
            replace(o, extra=o.extra + w - c) for o, w, c in zip(overlaps, wanted, counted, strict=True)
        )

    def _wanted(self, phases: int) -> list[float]:
        first, *others = self.phases[:phases]
        return [first - (float(self.totals[-1]) - sum(self.phases[phases:])), *others]


def first_overlaps(efficiency: float) -> tuple[Overlap, Overlap]:
    """Of forward and backward, before a timeline says more."""
    return Overlap(efficiency), Overlap(efficiency, AWAITED)


def agreed(space: SearchSpace, efficiency: float, judge: Judge | None, time_limit: float) -> Agreed:
    """The fastest plan of `space` by `judge`; without one, by the objective.

    efficiency: of two streams busy at once (`Profile.overlap_efficiency`). time_limit: seconds; the first search may
    take all of them. Raises `passes.solver.problem.Infeasible`.
    """
    overlaps = first_overlaps(efficiency)
    if judge is not None:
        return _Search(space, judge, time.monotonic() + time_limit).run(overlaps)
    found = solve_overlapped(space.problem, space.kinds(overlaps), time_limit=time_limit)
    choice = lighter(space.problem, found.choice)
    bound = _bound(found.lower_bound, found.cost)
    return Agreed(space.assignment(choice), choice, found.cost, bound, found.status, overlaps)


def _bound(known: float, seconds: float) -> float:
    """Of a plan of `seconds`. Where time ended before anything was proven, what no step goes below: nothing."""
    return min(max(known, 0.0), seconds)


def _others(overlaps: Sequence[Overlap]) -> Iterator[tuple[Overlap, ...]]:
    """As if half of it could hide; as if more hid behind fillers."""
    yield tuple(replace(o, efficiency=0.5 * o.efficiency, awaited=0.0) for o in overlaps)
    forward, *others = overlaps
    yield forward, *(replace(o, awaited=MORE_AWAITED) for o in others)


class _Search:
    """What was judged by choice, and the best of it."""

    def __init__(self, space: SearchSpace, judge: Judge, deadline: float) -> None:
        self.space = space
        self.judge = judge
        self.deadline = deadline
        self.judged: dict[tuple[int, ...], _Judged] = {}

    def run(self, overlaps: tuple[Overlap, ...]) -> Agreed:
        solution = self._solve(overlaps, None)
        best = self._judged(solution)
        if abs(best.counted(overlaps) - best.seconds) > AGREES * best.seconds:
            if len(self.space.edges) > AGAIN_EDGES:
                overlaps = best.shifted(overlaps)
            else:
                for other in _others(overlaps):
                    if not self._late():
                        best = self._better(self._solve(other, best), best)
                overlaps, solution, best = self._corrected(overlaps, best)
        seconds = best.counted(overlaps)
        bound = _bound(solution.lower_bound + sum(overlap.extra for overlap in overlaps), seconds)
        status = "optimal" if seconds - bound <= ROUNDING * seconds else "feasible"
        rivals = self._rivals(best, overlaps, bound)
        return Agreed(best.assignment, best.choice, seconds, bound, status, overlaps, rivals)

    def _rivals(self, best: _Judged, overlaps: tuple[Overlap, ...], bound: float) -> tuple[Agreed, ...]:
        others = [one for one in self.judged.values() if one is not best]
        others.sort(key=lambda one: (one.seconds, one.peak_nbytes))
        return tuple(one.agreed(one.corrected(overlaps), bound) for one in others)

    def _corrected(
        self, overlaps: tuple[Overlap, ...], best: _Judged
    ) -> tuple[tuple[Overlap, ...], Solution, _Judged]:
        """Searches under the overlap of the best plan, until they find no better one."""
        while True:
            own = best.corrected(overlaps)
            solution = self._solve(own, best)
            found = self._better(solution, best)
            if found is best or self._late():
                return own, solution, best
            best = found

    def _better(self, solution: Solution, best: _Judged) -> _Judged:
        known = len(self.judged)
        found = self._judged(solution)
        # What was judged before was compared then: nothing is returned to, so that searching again ends.
        return found if len(self.judged) > known and found.precedes(best) else best

    def _solve(self, overlaps: Sequence[Overlap], warm: _Judged | None) -> Solution:
        left = max(self.deadline - time.monotonic(), 1.0)
        return solve_overlapped(
            self.space.problem,
            self.space.kinds(overlaps),
            time_limit=left,
            warm=None if warm is None else warm.choice,
            relative_gap=0.0 if warm is None else AGAIN_GAP,
        )

    def _judged(self, solution: Solution) -> _Judged:
        choice = lighter(self.space.problem, solution.choice)
        if choice not in self.judged:
            assignment = self.space.assignment(choice)
            totals = self.space.totals(choice)
            said = self.judge(assignment)
            self.judged[choice] = _Judged(assignment, choice, totals, tuple(said.phases), said.peak_nbytes)
        return self.judged[choice]

    def _late(self) -> bool:
        return time.monotonic() >= self.deadline
