"""Search until the objective and the timeline agree on what a step takes.

The objective cannot place every collective: it says of a whole phase what may hide (`step_kinds`). The timeline of the
program that would run says what does. So the plan that the search finds is judged by its timeline; where the two differ,
the phases' overlap is corrected until the objective of that plan is its timeline, and the search runs again: its bound is
then a bound under that plan's own overlap. Of all plans judged the fastest on the timeline is taken. Plans found as if
less could hide are judged as well where the bound leaves room for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from passes.layout.assignment import Assignment
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import SearchSpace
from passes.search.step_kinds import Overlap, corrected, phase_seconds
from passes.solver.problem import Array, Solution

__all__ = ["AWAITED", "Agreed", "Judge", "agreed"]

Judge = Callable[[Assignment], Sequence[float]]
"""Seconds of the forward, the backward and of what follows, on the timeline of the program."""

AWAITED = 0.25
"""The share of what is awaited in the backward that is taken to hide behind fillers, before a timeline says how much."""
AGREES = 5e-3
"""Share of a step by which objective and timeline may differ without another search."""
ROOM = 3e-3
"""Share of a step by which the bound may be lower without more plans being judged."""
CORRECTIONS = 3
"""Most searches with corrected overlap in a row. Each has found a faster plan than the one before."""


@dataclass(frozen=True)
class Agreed:
    """assignment, choice: of the fastest plan judged. seconds: its objective under `overlaps`; lower_bound: no plan has
    less under them."""

    assignment: Assignment
    choice: tuple[int, ...]
    seconds: float
    lower_bound: float
    status: str
    overlaps: tuple[Overlap, ...]


@dataclass(frozen=True)
class _Judged:
    """totals: its seconds by kind. phases: of the timeline."""

    assignment: Assignment
    choice: tuple[int, ...]
    totals: Array
    phases: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.phases)

    def counted(self, overlaps: Sequence[Overlap]) -> float:
        """The objective."""
        return sum(phase_seconds(self.totals, overlaps)) + float(self.totals[-1])

    def corrected(self, overlaps: Sequence[Overlap]) -> tuple[Overlap, ...]:
        return corrected(self.totals, overlaps, self.phases[: len(overlaps)])


def agreed(space: SearchSpace, efficiency: float, judge: Judge | None, time_limit: float) -> Agreed:
    """The fastest plan of `space` by `judge`; without one, by the objective.

    efficiency: of two streams busy at once (`Profile.overlap_efficiency`). time_limit: seconds; the first search may
    take all of them. Raises `passes.solver.problem.Infeasible`.
    """
    overlaps = Overlap(efficiency), Overlap(efficiency, AWAITED)
    if judge is not None:
        return _Search(space, judge, time.monotonic() + time_limit).run(overlaps)
    found = solve_overlapped(space.problem, space.kinds(overlaps), time_limit=time_limit)
    choice = tuple(found.choice)
    return Agreed(space.assignment(choice), choice, found.cost, found.lower_bound, found.status, overlaps)


def _less(overlaps: Sequence[Overlap]) -> Iterator[tuple[Overlap, ...]]:
    """As if less could hide."""
    for share in (0.5, 0.0):
        yield tuple(replace(o, efficiency=share * o.efficiency, awaited=0.0) for o in overlaps)


def _extra(overlaps: Sequence[Overlap]) -> float:
    return sum(overlap.extra for overlap in overlaps)


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
        bound = solution.lower_bound + _extra(overlaps)
        for _ in range(CORRECTIONS):
            if abs(best.counted(overlaps) - best.seconds) <= AGREES * best.seconds or self._late():
                break
            overlaps = best.corrected(overlaps)
            solution = self._solve(overlaps, best)
            bound = solution.lower_bound + _extra(overlaps)
            found = self._judged(solution)
            if found.seconds >= best.seconds:
                break
            best = found
        rival = self._rival(best, bound, overlaps)
        if rival is not best:
            best, overlaps = rival, rival.corrected(overlaps)
            solution = self._solve(overlaps, best)
            bound = solution.lower_bound + _extra(overlaps)
        seconds = best.counted(overlaps)
        proven = solution.status == "optimal" and seconds - bound <= 1e-6 * seconds
        status = "optimal" if proven else "feasible"
        return Agreed(best.assignment, best.choice, seconds, min(bound, seconds), status, overlaps)

    def _rival(self, best: _Judged, bound: float, overlaps: Sequence[Overlap]) -> _Judged:
        """The fastest of what is judged, with plans for which less could hide, if the bound leaves room."""
        for other in _less(overlaps):
            if best.seconds - bound <= ROOM * best.seconds or self._late():
                break
            found = self._judged(self._solve(other, best))
            best = min(best, found, key=lambda judged: judged.seconds)
        return min(self.judged.values(), key=lambda judged: judged.seconds)

    def _solve(self, overlaps: Sequence[Overlap], warm: _Judged | None) -> Solution:
        left = max(self.deadline - time.monotonic(), 1.0)
        return solve_overlapped(
            self.space.problem,
            self.space.kinds(overlaps),
            time_limit=left,
            warm=None if warm is None else warm.choice,
        )

    def _judged(self, solution: Solution) -> _Judged:
        choice = tuple(solution.choice)
        if choice not in self.judged:
            assignment = self.space.assignment(choice)
            totals = self.space.totals(choice)
            self.judged[choice] = _Judged(assignment, choice, totals, tuple(self.judge(assignment)))
        return self.judged[choice]

    def _late(self) -> bool:
        return time.monotonic() >= self.deadline
