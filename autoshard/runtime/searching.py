"""The search for a better plan than the one that runs, in a process beside the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoshard.plan.division import Division
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import cached_search, keep_plan
from autoshard.plan.task import Task
from autoshard.progress import tell
from autoshard.refine.refine import refining
from autoshard.refine.time_work import TimedStore
from autoshard.refine.timed_cases import is_worth_it, refining_seconds
from autoshard.runtime.beside import TIMING_SHARE, Better, Search, Talk
from autoshard.runtime.making import Call
from autoshard.runtime.planner import Planner, tuned_path
from cost_model.deadline import Deadline
from cost_model.memory import format_seconds
from cost_model.timed import TimedPrices

WORTH = 0.05
"""Share of a short step that a better plan must save for a search to go on beside it."""
LEAST_WIN = 0.02
"""Share of a step that a plan must save for parameters to move to its layouts."""


def search_beside(planner: Planner, call: Call, first: Plan, store: TimedStore | None) -> Search | None:
    """What looks for a better plan of the call than `first` while that runs; None: no plan is worth it. The same on all
    ranks. store: of what is timed; None: nothing is."""
    s = planner.settings
    if first.gap <= s.gap and store is None:
        return None
    if first.gap < WORTH and not is_worth_it(first.step_time):
        seconds = format_seconds(first.step_time)
        tell(
            planner.mesh.get_rank(), f"tuning: no plan takes {WORTH:.0%} less than this one, {seconds} a step"
        )
        return None
    return Searching(planner.task(call.whole, call.layouts, s.pins), planner.division, first, store)


@dataclass(frozen=True)
class Searching:
    """Says which plans are better than `first`, and asks for times of kernels and collectives."""

    task: Task
    division: Division
    first: Plan
    store: TimedStore | None

    def __call__(self, talk: Talk) -> None:
        best = self.first
        for found, timed in self._found(talk):
            under = replace(self.task, timed=timed)
            if _seconds(found, under) < (1.0 - LEAST_WIN) * _seconds(best, under):
                best = found
                talk.send(Better(found.to_json()))
        keep_tuned(self.task, best)

    def _found(self, talk: Talk) -> Iterator[tuple[Plan, TimedPrices | None]]:
        """Plans, one after the other, and what was timed by then."""
        if self.store is None:
            yield self.division.fastest(self.task, Deadline.after(self.task.time_limit), cached_search), None
            return
        rounds = refining(self.task, self.division, self.store, budget=_budget)
        try:
            asked = next(rounds)
            while True:
                yield asked.plan, asked.timed
                talk.send(asked)
                asked = rounds.send(talk.recv())
        except StopIteration as end:
            yield end.value.plan, end.value.timed


def keep_tuned(task: Task, plan: Plan) -> None:
    """For the next start."""
    if plan.micro_batches == plan.head_pieces == 1:
        keep_plan(tuned_path(task), plan)


def _budget(step_seconds: float, time_limit: float, nodes: int, backend: str) -> float:
    """Beside the steps it takes as many times as long as its share of them is small."""
    return refining_seconds(step_seconds, time_limit, nodes, backend) / TIMING_SHARE


def _seconds(plan: Plan, task: Task) -> float:
    cut = cut_call(task.captured, plan.micro_batches, plan.head_pieces)
    return replace(task, captured=cut).step_seconds(plan)
