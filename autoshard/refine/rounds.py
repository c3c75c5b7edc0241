"""Rank 0's part in refining a plan: what is to be timed next, and the plan under what was timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from autoshard.plan.families import OF_WEIGHTS, Family
from autoshard.plan.family_choices import family_narrowing
from autoshard.plan.judged import Judged
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import cached_plan, keep_plan, kept_plan, plan_path
from autoshard.plan.task import Task, search_plan
from autoshard.refine.time_work import TimedStore
from autoshard.refine.timed_cases import Case, Cases, TimedCandidate, cases_of, refining_seconds, with_times
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, log
from cost_model.memory import format_seconds
from cost_model.timed import TimedPrices
from passes.layout.layout import Assignment
from passes.search.search_terms import COLD, Narrowing, SearchStart

Budget = Callable[[float, float, int, str], float]

MOST_ROUNDS = 4
"""Searches under timed prices. The second or third seldom finds another plan."""
UNCONFIRMED = 0.1
"""With more of a plan's step in kernels and collectives that there was no time for, the next start goes on."""
ROUGH_GAP = 0.05
"""The first search ends at this gap, as prices change after it: proving the rest takes minutes in deep models.
Not within a memory limit, where a plan that is nearly as fast may not fit."""
FASTER = 1e-3
"""Share of a step from which on a plan counts as faster."""


class Rounds:
    """One task, refined. plan: the one to take so far. timed: all that is known.

    The first plan is searched under what was timed before. `wanted` says what else there is to time, of this plan,
    of the next best and of the best of every family; `add` takes the times, searches again, and says so again, until
    the plan stays, everything of it was timed, or time is up. `plan` is then the fastest of those found where what was
    not timed counts twice: it may look fast only because nobody looked. Where that is much of it, it is timed and
    compared once more; where there is no time for that, the next start goes on with the times that this one kept.
    """

    def __init__(self, task: Task, store: TimedStore, budget: Budget = refining_seconds) -> None:
        self._task = task
        self._store = store
        self.timed = store.read()
        self._tried: set[object] = set()
        self._families: list[TimedCandidate] | None = None
        self._rounds = 0
        self._stayed = self._confirming = False
        self._next: list[TimedCandidate] = []
        self._path = plan_path(task, "refined", store.path.name)
        kept = kept_plan(self._path, self._under(self.timed))
        self._done = self._confirmed = kept is not None
        self._search_seconds = 0.0
        start = COLD if task.memory_limit else SearchStart(gap=ROUGH_GAP)
        self.plan = kept or kept_plan(plan_path(task), task) or self._searched(task, None, start)
        nodes, seconds = len(task.joint.graph.nodes), 0.0
        if not self._done:
            seconds = budget(self.plan.step_time, task.time_limit, nodes, task.backend)
            self.plan = self.plan if seconds else self._proven(self.plan)
        self._first, self._begun = self.plan, time.monotonic()
        self._found = [self.plan]
        # The search that follows timing does not start cold, as the first did.
        self._kept_for_search = 0.3 * seconds
        # Share of the budget, and the most seconds, for timing what is unknown of the chosen plan: no
        # search follows.
        self._confirming_seconds = min(0.3 * seconds, 5.0)
        # Searches of families may take a fifth of the budget.
        self._deadline, self._families_deadline = map(Deadline.after, (seconds, 0.2 * seconds))
        self._done = self._done or not seconds
        if not self._done and self.timed.if_any() is not None:
            self._search()

    def wanted(self) -> tuple[Case, ...]:
        """Cases to time next, in this order, a few known kernels first; (): none."""
        if self._done:
            return ()
        ended = self._confirming or self._stayed or self._rounds >= MOST_ROUNDS or self.seconds_left <= 0.0
        cases = () if ended else self._missing().untried(self._tried)
        cases = cases or self._to_confirm().untried(self._tried)
        if not cases:
            self._finish()
        return cases

    def _to_confirm(self) -> Cases:
        """Untimed cases of the plan that is chosen so far, where they are much of it; once."""
        if self._confirming:
            return Cases(())
        self._confirming = True
        seconds, plan = self._chosen(self._under(self.timed))
        cases = self._cases(TimedCandidate.of(plan))
        if cases.unknown_seconds <= UNCONFIRMED * seconds:
            return Cases(())
        self._deadline = self._deadline.at_least(self._confirming_seconds)
        return cases

    @property
    def seconds_left(self) -> float:
        """For timing: a search may come after it."""
        if self._confirming:
            return self._confirming_seconds
        return max(0.0, self._deadline.left - min(self._search_seconds, self._kept_for_search))

    def add(self, times: TimedPrices) -> None:
        """Search again, under these as well."""
        before = self.plan
        self.timed = with_times(self.timed, times)
        self._store.write(self.timed)
        self._rounds += 1
        if not self._confirming:
            self._search()
            # The first search knows no next best: those of the second are still to be timed.
            self._stayed = self.plan.planned.layouts == before.planned.layouts and self._rounds > 1

    def keep(self, plan: Plan) -> None:
        """For the next start, which takes it as it is; not where that is to go on timing."""
        if self._confirmed and not plan.axis:
            keep_plan(self._path, plan)

    def _under(self, timed: TimedPrices) -> Task:
        return replace(self._task, timed=timed)

    def _search(self) -> None:
        task = self._under(self.timed)
        self._next = []
        deadline = task.within(max(self._deadline.left, self._search_seconds)).firm
        try:
            near = SearchStart(self.plan.planned.layouts)
            self.plan = cached_plan(task, lambda: self._searched(task, deadline, near))
            self._found.append(self.plan)
        except InfeasibleError as error:  # it was not before: there was no time for it
            log.debug("refine: %s", error)

    def _proven(self, rough: Plan) -> Plan:
        """`rough`, or a better one, proven: it is the last."""
        near = SearchStart(rough.planned.layouts)
        proven = rough.gap <= self._task.gap
        return cached_plan(self._task, lambda: rough if proven else self._searched(self._task, None, near))

    def _searched(self, task: Task, deadline: Deadline | None, start: SearchStart) -> Plan:
        known: list[Judged] = []
        begun = time.monotonic()
        plan = search_plan(task, deadline, known.append, start)
        self._search_seconds = time.monotonic() - begun
        fastest = sorted(known, key=lambda judged: judged.seconds)
        others = [judged for judged in fastest if judged.planned.layouts != plan.planned.layouts]
        # The next best two are timed as well.
        self._next = [TimedCandidate(j.seconds, j.planned) for j in others[:2]]
        return plan

    def _missing(self) -> Cases:
        """Untimed cases of the plan and its rivals, the fastest plan first; of each the longest case first."""
        own = self._cases(TimedCandidate.of(self.plan))
        others = chain.from_iterable(self._cases(rival).unknown for rival in self._rivals())
        return Cases((*own.unknown, *own.instead, *others), own.again)

    def _unknown_seconds(self, plan: Plan) -> float:
        """Seconds of a step that were not timed."""
        return self._cases(TimedCandidate.of(plan)).unknown_seconds

    def _cases(self, candidate: TimedCandidate) -> Cases:
        return cases_of(candidate, self._under(self.timed))

    def _rivals(self) -> Iterable[TimedCandidate]:
        if self._families is None:
            self._families = sorted(self._best_of_families(), key=lambda candidate: candidate.seconds)
        return (*self._next, *self._families)

    def _best_of_families(self) -> Iterator[TimedCandidate]:
        for family in OF_WEIGHTS:
            deadline = self._families_deadline
            plan = self._family_plan(family, deadline) if deadline.left > 0.0 else None
            if plan is not None and not plan.joined_axes:
                yield TimedCandidate.of(plan, family)

    def _family_plan(self, family: Family, deadline: Deadline) -> Plan | None:
        """With the pins of the task; None where there is none."""
        task = self._under(self.timed)
        try:
            narrowing = family_narrowing(family, task.joint, task.mesh)
            return search_plan(replace(task, narrowing=narrowing), deadline.firm)
        except InfeasibleError:
            return None

    def _finish(self) -> None:
        """The fastest of the plans found and of the best of every family, under the prices of now."""
        self._done = True
        task = self._under(self.timed)
        seconds, best = self._chosen(task)
        for candidate in self._families or ():
            if task.judged(candidate.planned.layouts).seconds < (1.0 - FASTER) * seconds:
                found = self._of_family(candidate, task)
                if found is not None and self._cautious(task, found) < (1.0 - FASTER) * seconds:
                    best, seconds = found, self._cautious(task, found)
        self.plan = self._priced_now(best, task)
        self._confirmed = self._unknown_seconds(self.plan) <= UNCONFIRMED * seconds
        self.keep(self.plan)
        log.info("refine: %s", self._said())

    def _chosen(self, task: Task) -> tuple[float, Plan]:
        """The fastest of the plans found under the prices of now, and its cautious seconds."""
        plans = ((self._cautious(task, plan), plan) for plan in reversed(self._found))
        return min(plans, key=lambda item: item[0])

    def _priced_now(self, plan: Plan, task: Task) -> Plan:
        """`plan` under the prices of now, with the bound of the whole search that was the last."""
        latest = self._found[-1]
        if plan.origin.timed != self.timed.hash:
            plan = self._held(plan.planned.layouts, task) or plan
        if plan is latest:
            return plan
        bound = min(latest.lower_bound, plan.cost)
        return replace(plan, lower_bound=bound, status="feasible", again=task.again())

    def _of_family(self, candidate: TimedCandidate, task: Task) -> Plan | None:
        """The best of its family under the prices of now; where there is no time to look for it, the one known."""
        assert candidate.family is not None
        found = self._family_plan(candidate.family, self._deadline) if self._deadline.left > 0.0 else None
        return found or self._held(candidate.planned.layouts, task)

    def _held(self, assignment: Assignment, task: Task) -> Plan | None:
        """The plan of these layouts; None: there is none, or no time for it."""
        held = replace(task, narrowing=Narrowing(held=assignment))
        try:
            # Prices of one plan, without a search: a graph of 12 layers takes 3 seconds.
            return search_plan(held, self._deadline.at_least(60.0))
        except InfeasibleError:
            return None

    def _cautious(self, task: Task, plan: Plan) -> float:
        """A step of the plan under the prices of now, what was not timed counted twice."""
        return task.step_seconds(plan) + self._unknown_seconds(plan)

    def _said(self) -> str:
        same = self.plan.parameter_layouts == self._first.parameter_layouts
        counts = f"{len(self.timed.kernels)} kernels and {len(self.timed.collectives)} collectives are timed"
        steps = f"{format_seconds(self._first.step_time)} -> {format_seconds(self.plan.step_time)}"
        took = f"{time.monotonic() - self._begun:.0f} s"
        layouts = f"{'the same' if same else 'other'} parameters' layouts"
        return f"{counts}, {took}; predicted step {steps}, {layouts}"
