"""Search until the best plan is proven, or nothing is left to try.

The objective does not place every collective: it says of parts of a phase what may hide (`step_kinds`). The timeline
of the program that would run is the judge. After the plan that the objective likes best, looks for faster ones follow
one another:

    extremes    the fastest if nothing hides, if every reduction pays a start of its own, if more is awaited behind
                fillers; and the best with one kind of place turned over to what another has there
    corrected   the overlap of each phase is corrected until the objective of the best plan is its timeline, and the
                search runs again, until it finds no faster one
    stored      all weights stored alike
    turned      more places turned over (`turns`), transfers elsewhere (`past_transfers`)

They end once the best is within `gap` of the least that is counted under its overlap, by an objective that says what it
takes: extremes are looked at in any case, since it may be wrong about others. What is printed as the bound has no
seconds that one plan takes besides, and is as much lower as a program that was judged is faster than it is counted. Of
all plans judged the fastest on the timeline is taken; of those that take equally long, the one that holds the fewest
bytes at its peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from cost_model.deadline import Deadline
from passes.layout.layout import Assignment
from passes.search.bucket_starts import BucketStarts, StartsUnder
from passes.search.judged_choice import Choice, Judge, JudgedChoice, Judging, lighter, seconds_left
from passes.search.rival_choices import RivalChoices, past_transfers, turns
from passes.search.search_space import ALIKE, SearchSpace
from passes.search.search_terms import COLD, SearchStart
from passes.search.step_kinds import PhaseOverlap
from passes.solver.problem import Solution
from passes.solver.solve import ROUNDING

AWAITED = 0.1
"""Share of what is awaited in the backward that is taken to hide behind fillers, before a timeline says how much."""
AGREES = 1e-2
"""Share of a step by which objective and timeline may differ for the one to say what the other is."""
AGAIN_EDGES = 3000
"""Edges of the largest problem of which more than the extremes is looked at. In larger ones the objective is made the
timeline's by a constant for each phase: searches take seconds to minutes there, and few found a faster plan, by 1 % at
most."""
AGAIN_GAP = 2e-3
"""Relative gap of searches under a corrected overlap, which are about what a correction is worth."""
NEARLY = 3.0
"""Times the gap at which a search ends: within it a little more is tried, and most is not worth the wait."""
WORTH = 1e-3
"""Share of a step that starts of buckets must take for them to be counted."""
SEEN = 5e-3
"""Share of a step that a transfer takes for plans to be judged that have it elsewhere."""
TURNS, TURNED_EDGES, PATIENCE, MOST_EXPENSIVE = 8, 4000, 3, 0.02
"""Plans that differ from the best in one kind of place: how many are judged, of how many edges together, how many that
are no better end it, and by what share of its step they may take longer by the objective."""
NEAR = 0.05
"""Share of the best program's step by which those may be slower that say how much less programs take than counted."""


@dataclass(frozen=True)
class Agreed:
    """assignment, choice: of the fastest plan judged. seconds: its objective under `overlaps`; lower_bound: no plan
    takes less, if none is faster than it is counted by more than those that were judged. rivals: what else was judged,
    the fastest first, each under an overlap that makes its objective its timeline; the bound is the same."""

    assignment: Assignment
    choice: tuple[int, ...]
    seconds: float
    lower_bound: float
    status: str
    overlaps: tuple[PhaseOverlap, ...]
    rivals: tuple[Agreed, ...] = ()


_START = 0.02
"""Relative gap at which a plan is where others start (`SearchStart.room`)."""


def _rival(judged: JudgedChoice, overlaps: tuple[PhaseOverlap, ...], bound: float) -> Agreed:
    """With a bound that another plan was found under."""
    seconds = judged.counted(overlaps)
    return Agreed(judged.assignment, judged.choice, seconds, min(bound, seconds), "feasible", overlaps)


def first_overlaps(efficiency: float) -> tuple[PhaseOverlap, PhaseOverlap]:
    """Of forward and backward, before a timeline says more."""
    return PhaseOverlap(efficiency), PhaseOverlap(efficiency, AWAITED)


def agreed(
    space: SearchSpace,
    efficiency: float,
    judge: Judge | None,
    deadline: Deadline,
    start: SearchStart = COLD,
    hear: Callable[[Agreed], object] = lambda _: None,
    starts: StartsUnder = lambda *_: BucketStarts({}),
) -> Agreed:
    """The fastest plan of `space` by `judge`; without one, by the objective.

    efficiency: of two streams busy at once (`Profile.overlap_efficiency`). deadline: the first search may take all that
    is left. hear: told of every plan that is judged, and of the best when more is proven of it, each with what is
    known then. starts: counted for the bound alone. Raises `passes.solver.problem.Infeasible`.
    """
    overlaps = first_overlaps(efficiency)
    if judge is not None:
        return _Search(space, judge, deadline, start, hear, starts).run(overlaps)
    gap = _inner(start.gap or 0.0)
    found = RivalChoices(space, lambda: seconds_left(deadline)).solve(overlaps, start.choice(space), gap)
    choice = lighter(space.problem, found.choice)
    bound = _bound(found.lower_bound, found.cost)
    return Agreed(space.assignment(choice), choice, found.cost, bound, found.status, overlaps)


def _inner(gap: float) -> float:
    """Of a search by the objective, for one by the timeline that ends at `gap`: what they may differ by is left."""
    return max(0.0, gap - AGREES)


def _bound(known: float, seconds: float) -> float:
    """Of a plan of `seconds`. Where time ended before anything was proven, what no step goes below: nothing."""
    return min(max(known, 0.0), seconds)


@dataclass(eq=False)
class _Search:
    """One budget, one best so far, one bound. Looks for faster plans follow one another, those that cost little and
    find most first, until the best plan is proven to be within `gap` of any, or time is over.

    solution: the last by the objective, and overlaps: under which it is one. counted: under overlaps, what no choice is
    counted below. proven: with starts of buckets, at the end."""

    space: SearchSpace
    judge: Judge
    deadline: Deadline
    start: SearchStart
    hear: Callable[[Agreed], object]
    starts: StartsUnder
    proven: float = 0.0

    def __post_init__(self) -> None:
        space, hear, self.gap = self.space, self.hear, self.start.gap or 0.0
        self.judging = Judging(space, self.judge, self.deadline, lambda judged: hear(self._agreed(judged)))
        self.rivals = RivalChoices(space, self.judging.left)
        self.reads = sum(not edge.link for edge in space.edges)
        self.small = self.reads <= AGAIN_EDGES
        self.counted: dict[tuple[PhaseOverlap, ...], float] = {}
        self.watched = self.deadline.watch is not None and not self.deadline.of_part

    def run(self, overlaps: tuple[PhaseOverlap, ...]) -> Agreed:
        self.overlaps = overlaps
        known, gap = self.start.choice(self.space), _inner(self.gap)
        # Of the gap at which the search ends.
        self._take(self.rivals.solve(overlaps, known, gap, self._is_enough, 0.5 * self.gap))
        self.best = self.judging.of(self.solution.choice)
        apart = not self._stopped() and self._apart()
        if apart and (self.small or self.best.difference(overlaps) > AGREES):
            self._extremes()
        looks = (self._corrected, self._stored, self._turned, self._corrected)
        for look in looks if self.small and apart else ():
            if self._is_within(self.gap) or self.judging.late():
                break
            look()
        if not self._stopped() and not self.judging.late():
            self._prove()
        agreed = self._agreed(self.best, ended=True)
        return replace(agreed, rivals=self._others(self.best, agreed))

    def _take(self, solution: Solution) -> None:
        self.solution = solution
        self.counted[tuple(replace(o, extra=0.0) for o in self.overlaps)] = solution.lower_bound

    def _is_enough(self, solution: Solution) -> bool:
        """Whether what is known is near enough to the fastest for where others start."""
        if self.watched:
            self._take(solution)
            self.judging.program(solution.choice)
        return solution.gap <= _START and self.space.problem.peak(solution.choice)[0] > self.start.room

    def _stopped(self) -> bool:
        """By who judges or hears, and not by time: then the best so far is enough."""
        watch = self.judging.deadline.watch
        return self.judging.ended or (self.watched and watch is not None and watch.ended)

    def _apart(self) -> bool:
        """Whether plans are: where latency decides, the one in which every rank does all the work is as good as any."""
        alone = self.space.alone
        if alone is None or self.gap == 0.0 or alone.most_gain > ALIKE:
            return True
        self._look([alone.choice])
        return False

    def _is_within(self, gap: float) -> bool:
        """Whether the best plan is, by an objective that says what it takes; never, where the search has no gap."""
        near = self.best.difference(self.overlaps) <= max(AGREES, self.gap)
        return self.gap > 0.0 and near and self.best.seconds * (1.0 - gap) <= self._bound(self.overlaps)

    def _bound(self, overlaps: Sequence[PhaseOverlap]) -> float:
        """Of the last solution, where phases take what `overlaps` say besides: of plans that overlap as one does."""
        return self.solution.lower_bound + sum(overlap.extra for overlap in overlaps)

    def _proven(self) -> float:
        """Of programs, as far as those that were judged tell: of these the ones that are nearly as fast as the best."""
        faster = lambda overlaps: self._faster(lambda one: one.counted(overlaps))
        return max(self.proven, *(bound - faster(overlaps) for overlaps, bound in self.counted.items()))

    def _faster(self, counted: Callable[[JudgedChoice], float]) -> float:
        """By how many seconds a program is faster than it is counted, at most."""
        programs = self.judging.programs
        most = (1.0 + NEAR) * min(one.seconds for one in programs)
        return max(0.0, *(counted(one) - one.seconds for one in programs if one.seconds <= most))

    def _prove(self) -> None:
        """Counts once more, under the overlap of the best plan, where that is another and too little is proven; then
        with the starts of buckets, which the objective leaves out."""
        overlaps = self.best.corrected(self.overlaps)
        if not self._is_proven() and not all(map(PhaseOverlap.hides_as, self.overlaps, overlaps)):
            self.overlaps = overlaps
            self._again()
        if not self._is_proven():
            self._with_starts()

    def _is_proven(self) -> bool:
        return self._proven() >= self.best.seconds * (1.0 - self.gap)

    def _with_starts(self) -> None:
        overlaps, problem = [replace(overlap, extra=0.0) for overlap in self.overlaps], self.space.problem
        starts = self.starts(overlaps, WORTH * self.best.seconds)
        own = starts.of(problem, self.best.choice)
        if own == 0.0:
            return
        counted = lambda one: one.counted(overlaps) + starts.of(problem, one.choice)
        least, kinds = self.solution.lower_bound, self.space.kinds(overlaps)
        self.proven = starts.proven(problem, kinds, least, own, self.judging.left) - self._faster(counted)

    def _again(self) -> None:
        """Searches once more, from the best plan."""
        self._take(self.rivals.solve(self.overlaps, self.best.choice, max(AGAIN_GAP, _inner(self.gap))))
        self.hear(self._agreed(self.best))
        self.best = self.judging.better(self.solution.choice, self.best)

    def _look(self, choices: Iterable[Choice]) -> None:
        self.best = self.judging.best_of(choices, self.best)

    def _extremes(self) -> None:
        """What the objective may be wrong about, taken as far as it goes: an objective that is right about one plan may
        be far over another's."""
        rivals = self.rivals
        self._look(rivals.unhidden(self.best))
        self._look(rivals.alone(self.overlaps, self.best))
        self._look(rivals.awaited(self.overlaps, self.best))
        self._turn_to([one.choice for one in self.judging.known.values()], 1)

    def _stored(self) -> None:
        if self._is_within(NEARLY * self.gap):
            return
        self._look(self.rivals.stored(self.overlaps, self.best.seconds, self.judging.late))

    def _agreed(self, judged: JudgedChoice, ended: bool = False) -> Agreed:
        """With what is proven so far: before the search has ended, a program may turn out to be faster than counted."""
        overlaps, bound = self.overlaps, self._proven()
        if judged.difference(overlaps) > AGREES:
            overlaps = judged.shifted(overlaps)
        seconds = judged.counted(overlaps)
        bound = _bound(bound if ended else bound * (1.0 - AGREES), seconds)
        status = "optimal" if seconds - bound <= ROUNDING * seconds else "feasible"
        return Agreed(judged.assignment, judged.choice, seconds, bound, status, overlaps)

    def _others(self, best: JudgedChoice, agreed: Agreed) -> tuple[Agreed, ...]:
        others = [one for one in self.judging.known.values() if one is not best]
        others.sort(key=lambda one: (one.seconds, one.peak_nbytes))
        return tuple(_rival(one, one.corrected(agreed.overlaps), agreed.lower_bound) for one in others)

    def _turned(self) -> None:
        patience = 1 if self._is_within(NEARLY * self.gap) else PATIENCE
        self._turn_to(self.rivals.found, patience)
        past = past_transfers(self.space.problem, self.best.choice, SEEN * self.best.seconds)
        self._turn_to(past, patience)

    def _turn_to(self, others: Iterable[Choice], patience: int) -> None:
        """One kind of place after the other is turned over to what another plan has there, and back where that did not
        help; until as many as `patience` in a row did not."""
        problem, kinds, judging = self.space.problem, self.space.kinds(self.overlaps), self.judging
        left, waiting = min(TURNS, TURNED_EDGES // max(self.reads, 1)), patience
        for turn in turns(problem, kinds, self.best.choice, others):
            choice = lighter(problem, turn.of(self.best.choice))
            if min(left, waiting) <= 0 or turn.seconds > MOST_EXPENSIVE * self.best.seconds or judging.late():
                break
            if choice not in judging.known and isfinite(problem.cost(choice)) and problem.fits(choice):
                before, self.best = self.best, judging.better(choice, self.best)
                waiting = waiting - 1 if self.best is before else patience
                left -= 1

    def _corrected(self) -> None:
        """Searches under the overlap of the best plan, until they find no better one."""
        while True:
            before, self.overlaps = self.overlaps, self.best.corrected(self.overlaps)
            if all(a.hides_as(b) for a, b in zip(before, self.overlaps, strict=True)):
                return
            best = self.best
            self._again()
            if self.best is best or self._is_within(self.gap) or self.judging.late():
                return
