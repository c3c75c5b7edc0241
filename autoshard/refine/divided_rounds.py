"""Rank 0's part in refining a plan in pieces or in stages: what is to be timed next, and the plan under what was."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from autoshard.plan.plan import AnyPlan, PipelinePlan
from autoshard.plan.plan_cache import cached_search, keep_rehearsal, kept_rehearsal, plan_path
from autoshard.plan.rehearsed_plan import rehearsed_plan
from autoshard.plan.stages_option import Division
from autoshard.plan.task import Task
from autoshard.refine.divided_cases import cases_of_parts
from autoshard.refine.refining_time import refining_seconds
from autoshard.refine.timed_cases import Case, with_times
from autoshard.refine.timed_store import TimedStore
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from cost_model.timed import TimedPrices
from passes.plan.graph_text import format_seconds

__all__ = ["DividedRounds"]

_log = logging.getLogger("autoshard")

MOST_ROUNDS = 3
"""Of timing, each followed by a plan of the whole call."""


class DividedRounds:
    """One task in pieces or in stages, refined. plan, timed: as of `Rounds`.

    The plan is found under what was timed before. `wanted` says what of it there is to time; `add` takes the times and
    plans again, cuts and schedules included, until the plan stays, everything of it was timed, or time is up. No
    rivals are timed beside it: each would take as long to plan as the plan itself.
    """

    def __init__(
        self,
        task: Task,
        division: Division,
        store: TimedStore,
        budget: Callable[[float, float, int, str], float] = refining_seconds,
    ) -> None:
        self._task, self._division, self._store = task, division, store
        self.timed = store.read()
        self._tried: set[object] = set()
        self._rounds = 0
        begun = time.monotonic()
        self.plan = self._planned(Deadline.after(task.time_limit))
        self._planning_seconds = time.monotonic() - begun
        nodes = len(task.joint.graph.nodes)
        self._deadline = Deadline.after(budget(self.plan.step_time, task.time_limit, nodes, task.backend))
        self._done = self.seconds_left <= 0.0

    @property
    def seconds_left(self) -> float:
        """For timing: planning again comes after it."""
        return max(0.0, self._deadline.left - self._planning_seconds)

    def wanted(self) -> tuple[Case, ...]:
        """What is to be timed next, in this order, a few known kernels first; (): nothing."""
        ended = self._done or self._rounds >= MOST_ROUNDS or self.seconds_left <= 0.0
        known = replace(self._task, timed=self.timed)
        cases = () if ended else cases_of_parts(self.plan, known).untried(self._tried)
        if not cases:
            self._finish()
        return cases

    def _finish(self) -> None:
        """What was rehearsed before is known."""
        self._done = True
        self._rehearsal = plan_path(self._task, "rehearsed", self.plan.fingerprint)
        known = kept_rehearsal(self._rehearsal)
        if known is not None:
            self.plan = rehearsed_plan(self.plan, *known)

    def add(self, times: TimedPrices) -> None:
        """Plan again, under these as well."""
        self.timed = with_times(self.timed, times)
        self._store.write(self.timed)
        self._rounds += 1
        before = self.plan
        try:
            self.plan = self._planned(Deadline.after(max(self._deadline.left, self._planning_seconds)))
        except InfeasibleError as error:  # it was not before: there was no time for it
            _log.debug("refine: %s", error)
        self._done = _decided(self.plan) == _decided(before)
        steps = f"{format_seconds(before.step_time)} -> {format_seconds(self.plan.step_time)}"
        _log.info("refine: predicted step %s, %s plan", steps, "the same" if self._done else "another")

    def keep(self, plan: AnyPlan) -> None:
        """How long a step took: the next start plans again, under what was timed, and finds the plan of this one."""
        assert plan.rehearsed is not None
        keep_rehearsal(self._rehearsal, plan.rehearsed.measured, plan.rehearsed.busy)

    def _planned(self, deadline: Deadline) -> AnyPlan:
        task = replace(self._task, timed=self.timed.if_any())
        return self._division.fastest(task, deadline, cached_search)


def _decided(plan: AnyPlan) -> object:
    """What makes it another plan, prices aside."""
    if isinstance(plan, PipelinePlan):
        return plan.axis, plan.schedule, plan.micro_batches, plan.cut, [one.assignment for one in plan.stages]
    return plan.micro_batches, plan.head_pieces, plan.assignment
