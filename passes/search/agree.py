"""Search until the objective and the timeline agree on what a step takes.

The objective does not place every collective: it says of parts of a phase what may hide (`step_kinds`). The timeline of
the program that would run says what does. So the plan that the search finds is judged by its timeline, and what else
its weighted problems found that is nearly as fast. So are, in problems that are not large, the plan that is fastest if
nothing hides and those that store all weights alike (`stored`). Where objective and timeline differ, plans are judged
as well that were found as if less or more could hide or as if no reduction shared its start (`started_alone`), and that
differ from the best in one kind of place (`place_turns`, `past_transfers`). The overlap of each phase is corrected
until the objective of the best plan is its timeline, and the search runs again, until it finds no faster one. Its last
bound is one under the overlap that the best plan has. Of all plans judged the fastest on the timeline is taken; of
those that take equally long, the one that holds the fewest bytes at its peak.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite

from passes.layout.assignment import Assignment
from passes.search.judged_choice import Choice, Judge, JudgedChoice, counted_seconds
from passes.search.lighter import lighter
from passes.search.overlapped import solve_overlapped
from passes.search.past_transfers import past_transfers
from passes.search.place_turns import turns
from passes.search.search_space import SearchSpace
from passes.search.search_start import COLD, SearchStart
from passes.search.started_alone import started_alone, unpaid_starts
from passes.search.step_kinds import Overlap
from passes.search.stored import Allowed, places_in, places_of, restricted, stored_alike
from passes.solver.problem import Infeasible, Problem, Solution
from passes.solver.solve import ROUNDING, solve

__all__ = ["AWAITED", "Agreed", "agreed", "first_overlaps"]


AWAITED, MORE_AWAITED = 0.1, 0.25
"""Shares of what is awaited in the backward that are taken to hide behind fillers: before a timeline says how much, and
for a rival."""
AGREES = 1e-2
"""Share of a step by which objective and timeline may differ without another search."""
AGAIN_EDGES = 3000
"""Edges of the largest problem in which other plans are judged in any case, and that is searched again. In larger ones
the objective is made the timeline's by a constant for each phase: searches take seconds to minutes there, and few found
a faster plan, by 1 % at most."""
STORED_EDGES = 10_000
"""Edges of the largest problem in which plans whose weights are all stored alike are looked for where the timeline
differs."""
FAR, FASTEST, ROUGH_GAP, EXACT_GAP = 0.15, 2, 0.1, 5e-3
"""Share of a step by which these may be slower by the objective and still be judged, how many are, and the relative
gaps of the searches that say which, and of their own."""
AGAIN_GAP, RIVAL_GAP = 2e-3, 1e-2
"""Relative gap of searches under a corrected overlap, which are about what a correction is worth; and of those whose
plan is a rival and whose bound nobody reads."""
SEEN = 5e-3
"""Share of a step that a transfer takes for plans to be judged that have it elsewhere."""
NEAR, NEAREST = 0.02, 2
"""Of what the first search's weighted problems found, how many are judged, and by how much of its seconds they may take
longer by the objective."""
TURNS, TURNED_EDGES, PATIENCE = 8, 4000, 3
"""Plans that differ from the best in one kind of place: how many are judged, of how many edges together, and how many
that are no better end it."""


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


def _rival(judged: JudgedChoice, overlaps: tuple[Overlap, ...], bound: float) -> Agreed:
    """With a bound that another plan was found under."""
    seconds = judged.counted(overlaps)
    return Agreed(judged.assignment, judged.choice, seconds, min(bound, seconds), "feasible", overlaps)


def first_overlaps(efficiency: float) -> tuple[Overlap, Overlap]:
    """Of forward and backward, before a timeline says more."""
    return Overlap(efficiency), Overlap(efficiency, AWAITED)


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
    found = solve_overlapped(
        space.problem,
        space.kinds(overlaps),
        time_limit=time_limit,
        warm=start.choice(space),
        relative_gap=start.gap,
    )
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
    """judged: by choice. found: by all searches, judged or not, in order. again: whether other plans are looked for in
    any case, and searches follow under corrected overlaps; alike: whether at least those that store all weights alike
    are, where the timeline differs. A search that ends at a gap does neither."""

    def __init__(self, space: SearchSpace, judge: Judge, deadline: float, start: SearchStart) -> None:
        self.space = space
        self.judge = judge
        self.deadline = deadline
        self.start = start
        edges, proves = len(space.edges), start.gap == 0.0
        self.again, self.alike = proves and edges <= AGAIN_EDGES, proves and edges <= STORED_EDGES
        self.judged: dict[Choice, JudgedChoice] = {}
        self.found: dict[Choice, None] = {}

    def run(self, overlaps: tuple[Overlap, ...]) -> Agreed:
        solution = self._solve(overlaps, self.start.choice(self.space), self.start.gap)
        best = first = self._judged(solution.choice)
        if self.again:
            best = self._best_of(chain(self._near(solution, overlaps), self._unhidden(best)), best)
            best = self._best_of(self._stored(overlaps, best.seconds), best)
        elif self.alike and best.difference(overlaps) > AGREES:
            best = self._best_of(self._stored(overlaps, best.seconds), best)
        # No rival gives the lie to an objective that said what the first plan takes.
        settled = first.difference(overlaps) <= AGREES and best.seconds >= (1.0 - AGREES) * first.seconds
        if self.again and not settled:
            best = self._best_of(self._found_under(_others(overlaps), best), best)
            best = self._best_of(self._alone(overlaps, best), best)
            best = self._turned(overlaps, best)
            overlaps, solution, best = self._corrected(overlaps, best)
        elif best.difference(overlaps) > AGREES:
            overlaps = best.shifted(overlaps)
        seconds = best.counted(overlaps)
        bound = _bound(solution.lower_bound + sum(overlap.extra for overlap in overlaps), seconds)
        status = "optimal" if seconds - bound <= ROUNDING * seconds else "feasible"
        rivals = self._rivals(best, overlaps, bound)
        return Agreed(best.assignment, best.choice, seconds, bound, status, overlaps, rivals)

    def _rivals(self, best: JudgedChoice, overlaps: tuple[Overlap, ...], bound: float) -> tuple[Agreed, ...]:
        others = [one for one in self.judged.values() if one is not best]
        others.sort(key=lambda one: (one.seconds, one.peak_nbytes))
        return tuple(_rival(one, one.corrected(overlaps), bound) for one in others)

    def _near(self, solution: Solution, overlaps: Sequence[Overlap]) -> Iterator[Choice]:
        """What was found on the way to `solution` and takes little longer by the objective."""
        for choice in solution.others[:NEAREST]:
            if counted_seconds(self.space.totals(choice), overlaps) <= (1.0 + NEAR) * solution.cost:
                yield choice

    def _unhidden(self, best: JudgedChoice) -> Iterator[Choice]:
        """The fastest if nothing hides: where the objective is the timeline of one plan, it may be far over another's,
        whose gathers share buckets."""
        yield self._if_nothing_hides(self.space.problem, best)

    def _found_under(self, others: Iterable[tuple[Overlap, ...]], warm: JudgedChoice) -> Iterator[Choice]:
        for other in others:
            yield self._solve(other, warm.choice, RIVAL_GAP).choice

    def _alone(self, overlaps: tuple[Overlap, ...], best: JudgedChoice) -> Iterator[Choice]:
        """As if nothing hid, and every reduction that only the end needs took by itself what `best` takes besides;
        where that is more than all of them are counted for: they share the start of a bucket that they do not fill."""
        starts = unpaid_starts(best.totals, best.missing(overlaps))
        if max(starts) > AGREES * best.seconds:
            problem = started_alone(self.space.problem, self.space.kinds(overlaps), starts)
            yield self._if_nothing_hides(problem, best)

    def _if_nothing_hides(self, problem: Problem, warm: JudgedChoice) -> Choice:
        found = solve(problem, time_limit=self._left(), relative_gap=RIVAL_GAP, warm=warm.choice)
        self.found[found.choice] = None
        return found.choice

    def _stored(self, overlaps: Sequence[Overlap], seconds: float) -> Iterator[Choice]:
        """Of every way to store all weights alike about the plan that is fastest if nothing hides; of these the fastest
        by the objective, if they are not far slower than `seconds`, searched again."""
        counted: list[tuple[float, Allowed, Choice]] = []
        for allowed in stored_alike(self.space):
            with suppress(Infeasible):
                choice = self._apart(allowed, ROUGH_GAP, None)
                counted.append((counted_seconds(self.space.totals(choice), overlaps), allowed, choice))
            if self._late():
                break
        counted.sort(key=lambda one: one[0])
        for taken, allowed, rough in counted[:FASTEST]:
            if taken <= (1.0 + FAR) * seconds:
                yield self._apart(allowed, EXACT_GAP, rough)

    def _apart(self, allowed: Allowed, gap: float, warm: Choice | None) -> Choice:
        """The fastest choice of what is allowed if nothing hides. warm: a choice that is."""
        problem = restricted(self.space.problem, allowed)
        known = None if warm is None else places_of(allowed, warm)
        found = solve(problem, time_limit=self._left(), relative_gap=gap, warm=known)
        choice = places_in(allowed, found.choice)
        self.found[choice] = None
        return choice

    def _turned(self, overlaps: Sequence[Overlap], best: JudgedChoice) -> JudgedChoice:
        """The best after one kind of place after the other was turned over to what another plan has there, and back
        where that did not help; then to where a transfer may be instead."""
        best = self._turned_to(self.found, overlaps, best)
        return self._turned_to(
            past_transfers(self.space.problem, best.choice, SEEN * best.seconds), overlaps, best
        )

    def _turned_to(
        self, others: Iterable[Choice], overlaps: Sequence[Overlap], best: JudgedChoice
    ) -> JudgedChoice:
        problem, kinds = self.space.problem, self.space.kinds(overlaps)
        left = min(TURNS, TURNED_EDGES // max(len(self.space.edges), 1))
        patience = PATIENCE
        for turn in turns(problem, kinds, best.choice, others):
            choice = lighter(problem, turn.of(best.choice))
            if min(left, patience) <= 0 or turn.seconds > NEAR * best.seconds or self._late():
                break
            if choice not in self.judged and isfinite(problem.cost(choice)) and problem.fits(choice):
                known, best = best, self._better(choice, best)
                patience = patience - 1 if best is known else PATIENCE
                left -= 1
        return best

    def _best_of(self, choices: Iterable[Choice], best: JudgedChoice) -> JudgedChoice:
        """The best of all, until time is over."""
        for choice in choices:
            best = self._better(choice, best)
            if self._late():
                break
        return best

    def _corrected(
        self, overlaps: tuple[Overlap, ...], best: JudgedChoice
    ) -> tuple[tuple[Overlap, ...], Solution, JudgedChoice]:
        """Searches under the overlap of the best plan, until they find no better one."""
        while True:
            own = best.corrected(overlaps)
            solution = self._solve(own, best.choice, AGAIN_GAP)
            found = self._better(solution.choice, best)
            if found is best or self._late():
                return own, solution, best
            best = found

    def _better(self, choice: Choice, best: JudgedChoice) -> JudgedChoice:
        known = len(self.judged)
        found = self._judged(choice)
        # What was judged before was compared then: nothing is returned to, so that searching again ends.
        return found if len(self.judged) > known and found.precedes(best) else best

    def _solve(self, overlaps: Sequence[Overlap], warm: Choice | None, gap: float) -> Solution:
        found = solve_overlapped(
            self.space.problem,
            self.space.kinds(overlaps),
            time_limit=self._left(),
            warm=warm,
            relative_gap=gap,
        )
        self.found.update(dict.fromkeys((found.choice, *found.others)))
        return found

    def _judged(self, choice: Choice) -> JudgedChoice:
        choice = lighter(self.space.problem, choice)
        if choice not in self.judged:
            assignment = self.space.assignment(choice)
            totals = self.space.totals(choice)
            said = self.judge(assignment)
            self.judged[choice] = JudgedChoice(
                assignment, choice, totals, tuple(said.phases), said.peak_nbytes
            )
        return self.judged[choice]

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)

    def _late(self) -> bool:
        return time.monotonic() >= self.deadline
