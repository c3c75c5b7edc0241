"""Search, and let the timeline say what a step of the plan takes.

The objective does not place every collective: it says of parts of a phase what may hide (`step_kinds`). The timeline of
the program that would run says what does. So the plan that the search finds is judged by its timeline, and in problems
that are not large two others as well: the fastest if nothing hides, and the fastest if every reduction that only
the end of a phase needs pays for a start of its own (`started_alone`). Of all plans judged the fastest on the timeline
is taken; of those that take equally long, the one that holds the fewest bytes at its peak. A constant for each phase
makes its objective its timeline; the bound of the search is one of plans that overlap so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.layout.assignment import Assignment
from passes.search.judged_choice import Choice, Judge, JudgedChoice
from passes.search.judging import Judging
from passes.search.lighter import lighter
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import SearchSpace
from passes.search.search_start import COLD, SearchStart
from passes.search.started_alone import started_alone, unpaid_starts
from passes.search.step_kinds import PhaseOverlap
from passes.solver.problem import Problem
from passes.solver.solve import ROUNDING, solve

__all__ = ["AWAITED", "Agreed", "agreed", "first_overlaps"]


AWAITED = 0.1
"""Share of what is awaited in the backward that is taken to hide behind fillers, before a timeline says how much."""
AGREES = 1e-2
"""Share of a step by which objective and timeline may differ without another search."""
RIVAL_EDGES = 3000
"""Edges of the largest problem in which other plans are judged. In larger ones they gain nothing that their seconds to
minutes are worth."""
RIVAL_GAP = 1e-2
"""Relative gap of searches whose plan is a rival and whose bound nobody reads."""
UNPAID = 1e-2
"""Share of a step that the starts of reductions must take besides for plans with fewer of them to be looked for."""


@dataclass(frozen=True)
class Agreed:
    """assignment, choice: of the fastest plan judged. seconds: its objective under `overlaps`; lower_bound: no plan has
    less under them. rivals: what else was judged, the fastest first, each under an overlap that makes its objective its
    timeline; the bound is the same. own: the overlap by which the plan's objective is its timeline, however large the
    problem is."""

    assignment: Assignment
    choice: tuple[int, ...]
    seconds: float
    lower_bound: float
    status: str
    overlaps: tuple[PhaseOverlap, ...]
    own: tuple[PhaseOverlap, ...]
    rivals: tuple[Agreed, ...] = ()


def _rival(judged: JudgedChoice, overlaps: tuple[PhaseOverlap, ...], bound: float) -> Agreed:
    """With a bound that another plan was found under."""
    seconds = judged.counted(overlaps)
    return Agreed(
        judged.assignment, judged.choice, seconds, min(bound, seconds), "feasible", overlaps, overlaps
    )


def first_overlaps(efficiency: float) -> tuple[PhaseOverlap, PhaseOverlap]:
    """Of forward and backward, before a timeline says more."""
    return PhaseOverlap(efficiency), PhaseOverlap(efficiency, AWAITED)


def agreed(
    space: SearchSpace, efficiency: float, judge: Judge | None, time_limit: float, start: SearchStart = COLD
) -> Agreed:
    """The fastest plan of `space` by `judge`; without one, by the objective.

    efficiency: of two streams busy at once (`Profile.overlap_efficiency`). time_limit: seconds; the first search may
    take all of them. Raises `passes.solver.problem.Infeasible`.
    """
    overlaps = first_overlaps(efficiency)
    deadline = time.monotonic() + time_limit
    kinds, warm = space.kinds(overlaps), start.choice(space)
    solution = solve_overlapped(
        space.problem, kinds, time_limit=time_limit, warm=warm, relative_gap=start.gap
    )
    if judge is None:
        choice = lighter(space.problem, solution.choice)
        bound = _bound(solution.lower_bound, solution.cost)
        return Agreed(
            space.assignment(choice), choice, solution.cost, bound, solution.status, overlaps, overlaps
        )
    judging = Judging(space, judge, deadline)
    best = judging.of(solution.choice)
    if start.gap == 0.0 and len(space.edges) <= RIVAL_EDGES:
        best = judging.best_of(_rivals(space, overlaps, judging, best), best)
    if best.difference(overlaps) > AGREES:
        overlaps = best.shifted(overlaps)
    seconds = best.counted(overlaps)
    bound = _bound(solution.lower_bound + sum(overlap.extra for overlap in overlaps), seconds)
    status = "optimal" if seconds - bound <= ROUNDING * seconds else "feasible"
    others = sorted(
        (one for one in judging.known.values() if one is not best),
        key=lambda one: (one.seconds, one.peak_nbytes),
    )
    rivals = tuple(_rival(one, one.corrected(overlaps), bound) for one in others)
    own = best.corrected(overlaps)
    return Agreed(best.assignment, best.choice, seconds, bound, status, overlaps, own, rivals)


def _bound(known: float, seconds: float) -> float:
    """Of a plan of `seconds`. Where time ended before anything was proven, what no step goes below: nothing."""
    return min(max(known, 0.0), seconds)


def _rivals(
    space: SearchSpace, overlaps: Sequence[PhaseOverlap], judging: Judging, first: JudgedChoice
) -> Iterator[Choice]:
    """The fastest if nothing hides: where the objective is the timeline of one plan, it may be far over another's,
    whose gathers share buckets. Then the fastest if nothing hid and every reduction that only the end needs took by
    itself what `first` takes besides, where that is more than all of them are counted for: they share the start of a
    bucket that they do not fill."""

    def fastest(problem: Problem) -> Choice:
        return solve(problem, time_limit=judging.left(), relative_gap=RIVAL_GAP, warm=first.choice).choice

    yield fastest(space.problem)
    starts = unpaid_starts(first.totals, first.missing(overlaps))
    if max(starts) > UNPAID * first.seconds:
        yield fastest(started_alone(space.problem, space.kinds(overlaps), starts))
