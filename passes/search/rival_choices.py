"""Choices that the objective passes over and that may be faster on the timeline.

The one that is fastest if nothing hides, and those that store all weights alike (`stored`); those found as if more
could hide, or as if no reduction shared its start (`bucket_starts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from passes.search.bucket_starts import started_alone, unpaid_starts
from passes.search.judged_choice import Choice, JudgedChoice, counted_seconds
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import SearchSpace
from passes.search.step_kinds import PhaseOverlap
from passes.search.stored import Allowed, places_in, places_of, stored_alike
from passes.solver.problem import Infeasible, Problem, Solution
from passes.solver.solve import restricted, solve

MORE_AWAITED = 0.25
"""Share of what is awaited in the backward that is taken to hide behind fillers, for a rival."""
FAR, FASTEST, ROUGH_GAP, EXACT_GAP = 0.15, 2, 0.1, 5e-3
"""Share of a step by which those that store weights alike may be slower by the objective and still be judged, how many
are, and the relative gaps of the searches that say which, and of their own."""
RIVAL_GAP = 1e-2
"""Relative gap of searches whose plan is a rival and whose bound nobody reads."""
UNPAID = 1e-2
"""Share of a step that the starts of reductions must take besides for plans with fewer of them to be looked for."""
WORTH = 1e-3
"""Share of a step that may hide besides for plans of which more does to be looked for."""


class RivalChoices:
    """Of one search. left: seconds for what is to be solved next. found: by all searches, in order."""

    def __init__(self, space: SearchSpace, left: Callable[[], float]) -> None:
        self._space, self._left = space, left
        self.found: dict[Choice, None] = {}

    def solve(
        self,
        overlaps: Sequence[PhaseOverlap],
        warm: Choice | None,
        gap: float,
        hear: Callable[[Solution], object] = lambda _: None,
    ) -> Solution:
        """The fastest by the objective. hear: of `solve_overlapped`."""
        found = solve_overlapped(
            self._space.problem,
            self._space.kinds(overlaps),
            time_limit=self._left(),
            warm=warm,
            relative_gap=gap,
            known=list(self.found),
            hear=hear,
        )
        self.found.update(dict.fromkeys((found.choice, *found.others)))
        return found

    def unhidden(self, best: JudgedChoice) -> Iterator[Choice]:
        """The fastest if nothing hides: where the objective is the timeline of one plan, it may be far over another's,
        whose gathers share buckets."""
        yield self._if_nothing_hides(self._space.problem, best)

    def awaited(self, overlaps: Sequence[PhaseOverlap], best: JudgedChoice) -> Iterator[Choice]:
        """As if more of what the backward waits for hid behind fillers, where that may be worth something."""
        forward, *others = overlaps
        more = (forward, *(replace(overlap, awaited=MORE_AWAITED) for overlap in others))
        if best.counted(overlaps) - best.counted(more) > WORTH * best.seconds:
            yield self.solve(more, best.choice, RIVAL_GAP).choice

    def alone(self, overlaps: Sequence[PhaseOverlap], best: JudgedChoice) -> Iterator[Choice]:
        """As if nothing hid, and every reduction that only the end needs took by itself what `best` takes besides;
        where that is more than all of them are counted for: they share the start of a bucket that they do not fill."""
        starts = unpaid_starts(best.totals, best.missing(overlaps))
        if max(starts) > UNPAID * best.seconds:
            problem = started_alone(self._space.problem, self._space.kinds(overlaps), starts)
            yield self._if_nothing_hides(problem, best)

    def stored(
        self, overlaps: Sequence[PhaseOverlap], seconds: float, late: Callable[[], bool]
    ) -> Iterator[Choice]:
        """Of every way to store all weights alike about the plan that is fastest if nothing hides; of these the fastest
        by the objective, if they are not far slower than `seconds`, searched again. late: whether time is over."""
        counted: list[tuple[float, Allowed, Choice]] = []
        for allowed in stored_alike(self._space):
            with suppress(Infeasible):
                choice = self._apart(allowed, ROUGH_GAP, None)
                counted.append((counted_seconds(self._space.totals(choice), overlaps), allowed, choice))
            if late():
                break
        counted.sort(key=lambda one: one[0])
        for taken, allowed, rough in counted[:FASTEST]:
            if taken <= (1.0 + FAR) * seconds:
                yield self._apart(allowed, EXACT_GAP, rough)

    def _if_nothing_hides(self, problem: Problem, warm: JudgedChoice) -> Choice:
        found = solve(problem, time_limit=self._left(), relative_gap=RIVAL_GAP, warm=warm.choice)
        self.found[found.choice] = None
        return found.choice

    def _apart(self, allowed: Allowed, gap: float, warm: Choice | None) -> Choice:
        """The fastest choice of what is allowed if nothing hides. warm: a choice that is."""
        problem = restricted(self._space.problem, allowed)
        known = None if warm is None else places_of(allowed, warm)
        found = solve(problem, time_limit=self._left(), relative_gap=gap, warm=known)
        choice = places_in(allowed, found.choice)
        self.found[choice] = None
        return choice
