"""Search until the objective and the timeline agree on what a step takes.

The objective does not place every collective: it says of parts of a phase what may hide (`step_kinds`). The timeline of
the program that would run says what does. So the plan that the search finds is judged by its timeline, and what else
its weighted problems found that is nearly as fast; in problems that are not large other plans as well
(`rival_choices`), more of them where objective and timeline differ, and there those that differ from the best in one
kind of place (`place_turns`, `past_transfers`). The overlap of each phase is corrected until the objective of the best
plan is its timeline, and the search runs again, until it finds no faster one. Its last bound is one under the overlap
that the best plan has. Of all plans judged the fastest on the timeline is taken; of those that take equally long, the
one that holds the fewest bytes at its peak.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite

from passes.layout.assignment import Assignment
from passes.search.judged_choice import Choice, Judge, JudgedChoice
from passes.search.judging import Judging
from passes.search.lighter import lighter
from passes.search.past_transfers import past_transfers
from passes.search.place_turns import turns
from passes.search.rival_choices import RivalChoices
from passes.search.search_space import SearchSpace
from passes.search.search_start import COLD, SearchStart
from passes.search.step_kinds import PhaseOverlap
from passes.solver.problem import Solution
from passes.solver.solve import ROUNDING

AWAITED = 0.1
"""Share of what is awaited in the backward that is taken to hide behind fillers, before a timeline says how much."""
AGREES = 1e-2
"""Share of a step by which objective and timeline may differ without another search."""
AGAIN_EDGES = 3000
"""Edges of the largest problem in which other plans are judged in any case, and that is searched again. In larger ones
the objective is made the timeline's by a constant for each phase: searches take seconds to minutes there, and few found
a faster plan, by 1 % at most."""
STORED_EDGES = 10_000
"""Edges of the largest problem in which plans whose weights are all stored alike are looked for where the timeline
differs."""
AGAIN_GAP = 2e-3
"""Relative gap of searches under a corrected overlap, which are about what a correction is worth."""
SEEN = 5e-3
"""Share of a step that a transfer takes for plans to be judged that have it elsewhere."""
TURNS, TURNED_EDGES, PATIENCE, MOST_EXPENSIVE = 8, 4000, 3, 0.02
"""Plans that differ from the best in one kind of place: how many are judged, of how many edges together, how many that
are no better end it, and by what share of its step they may take longer by the objective."""


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
    if judge is not None:
        return _Search(space, judge, time.monotonic() + time_limit, start).run(overlaps)
    found = RivalChoices(space, lambda: time_limit).solve(overlaps, start.choice(space), start.gap)
    choice = lighter(space.problem, found.choice)
    bound = _bound(found.lower_bound, found.cost)
    return Agreed(space.assignment(choice), choice, found.cost, bound, found.status, overlaps, overlaps)


def _bound(known: float, seconds: float) -> float:
    """Of a plan of `seconds`. Where time ended before anything was proven, what no step goes below: nothing."""
    return min(max(known, 0.0), seconds)


class _Search:
    """again: whether other plans are looked for in any case, and searches follow under corrected overlaps; alike:
    whether at least those that store all weights alike are, where the timeline differs. A search that ends at a gap
    does neither."""

    def __init__(self, space: SearchSpace, judge: Judge, deadline: float, start: SearchStart) -> None:
        self.space = space
        self.start = start
        edges, proves = len(space.edges), start.gap == 0.0
        self.again, self.alike = proves and edges <= AGAIN_EDGES, proves and edges <= STORED_EDGES
        self.judging = Judging(space, judge, deadline)
        self.rivals = RivalChoices(space, self.judging.left)

    def run(self, overlaps: tuple[PhaseOverlap, ...]) -> Agreed:
        rivals, best_of = self.rivals, self.judging.best_of
        solution = rivals.solve(overlaps, self.start.choice(self.space), self.start.gap)
        best = first = self.judging.of(solution.choice)
        if self.again:
            best = best_of(chain(rivals.near(solution, overlaps), rivals.unhidden(best)), best)
            best = best_of(self._stored(overlaps, best), best)
        elif self.alike and best.difference(overlaps) > AGREES:
            best = best_of(self._stored(overlaps, best), best)
        # No rival gives the lie to an objective that said what the first plan takes.
        settled = first.difference(overlaps) <= AGREES and best.seconds >= (1.0 - AGREES) * first.seconds
        if self.again and not settled:
            best = best_of(rivals.hiding_otherwise(overlaps, best), best)
            best = best_of(rivals.alone(overlaps, best), best)
            best = self._turned(overlaps, best)
            overlaps, solution, best = self._corrected(overlaps, best)
        elif best.difference(overlaps) > AGREES:
            overlaps = best.shifted(overlaps)
        seconds = best.counted(overlaps)
        bound = _bound(solution.lower_bound + sum(overlap.extra for overlap in overlaps), seconds)
        status = "optimal" if seconds - bound <= ROUNDING * seconds else "feasible"
        others, own = self._others(best, overlaps, bound), best.corrected(overlaps)
        return Agreed(best.assignment, best.choice, seconds, bound, status, overlaps, own, others)

    def _others(
        self, best: JudgedChoice, overlaps: tuple[PhaseOverlap, ...], bound: float
    ) -> tuple[Agreed, ...]:
        others = [one for one in self.judging.known.values() if one is not best]
        others.sort(key=lambda one: (one.seconds, one.peak_nbytes))
        return tuple(_rival(one, one.corrected(overlaps), bound) for one in others)

    def _stored(self, overlaps: Sequence[PhaseOverlap], best: JudgedChoice) -> Iterator[Choice]:
        return self.rivals.stored(overlaps, best.seconds, self.judging.late)

    def _turned(self, overlaps: Sequence[PhaseOverlap], best: JudgedChoice) -> JudgedChoice:
        """The best after one kind of place after the other was turned over to what another plan has there, and back
        where that did not help; then to where a transfer may be instead."""
        best = self._turned_to(self.rivals.found, overlaps, best)
        return self._turned_to(
            past_transfers(self.space.problem, best.choice, SEEN * best.seconds), overlaps, best
        )

    def _turned_to(
        self, others: Iterable[Choice], overlaps: Sequence[PhaseOverlap], best: JudgedChoice
    ) -> JudgedChoice:
        problem, kinds, judging = self.space.problem, self.space.kinds(overlaps), self.judging
        left = min(TURNS, TURNED_EDGES // max(len(self.space.edges), 1))
        patience = PATIENCE
        for turn in turns(problem, kinds, best.choice, others):
            choice = lighter(problem, turn.of(best.choice))
            if min(left, patience) <= 0 or turn.seconds > MOST_EXPENSIVE * best.seconds or judging.late():
                break
            if choice not in judging.known and isfinite(problem.cost(choice)) and problem.fits(choice):
                known, best = best, judging.better(choice, best)
                patience = patience - 1 if best is known else PATIENCE
                left -= 1
        return best

    def _corrected(
        self, overlaps: tuple[PhaseOverlap, ...], best: JudgedChoice
    ) -> tuple[tuple[PhaseOverlap, ...], Solution, JudgedChoice]:
        """Searches under the overlap of the best plan, until they find no better one."""
        while True:
            own = best.corrected(overlaps)
            solution = self.rivals.solve(own, best.choice, AGAIN_GAP)
            found = self.judging.better(solution.choice, best)
            if found is best or self.judging.late():
                return own, solution, best
            best = found
