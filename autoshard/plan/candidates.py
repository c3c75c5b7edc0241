"""The plans that a race is between: the best, the best of other families, the next best that the search judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.plan.families import FAMILIES
from autoshard.plan.plan import AnyPlan, PipelinePlan, Plan, any_plan_from_json
from autoshard.plan.plan_collectives import collectives_of
from autoshard.plan.task import Task, search_plan, search_plans
from autoshard.plan.why_not import Variant, is_of_family
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError

BEST, NEXT = "the search's", "the next best"
"""Names of the plan that the search found, and of what else it judged."""
_APART = 1e-3
"""Share of a step by which two plans of equal layouts of parameters and equal collectives are predicted apart, so that
they are two."""


@dataclass(frozen=True)
class Candidate:
    """name: how it was found."""

    name: str
    plan: AnyPlan

    def to_json(self) -> list[Any]:
        return [self.name, self.plan.to_json()]

    @staticmethod
    def from_json(data: Any) -> Candidate:
        """PlanError for a damaged plan, ValueError or TypeError for what is no pair."""
        name, plan = data
        return Candidate(str(name), any_plan_from_json(plan))


def candidates(task: Task, count: int) -> list[Candidate]:
    """At most `count` plans that differ, the search's own first. Fewer where there are fewer, or where the task's time
    limit ends first, which is for all searches together. Raises InfeasibleError if there is no plan."""
    deadline = Deadline.after(task.time_limit)
    best, *judged = search_plans(task, deadline, most=count)
    own = Candidate(BEST, best)
    if count < 2:
        return [own]
    return chosen_candidates(
        own, list(_of_families(task, deadline)), [Candidate(NEXT, plan) for plan in judged], count
    )


def chosen_candidates(
    best: Candidate, families: Sequence[Candidate], judged: Sequence[Candidate], count: int
) -> list[Candidate]:
    """The best; of `families` the fastest other, of `judged` too; then what is left of both, by prediction."""
    families, judged = by_prediction(families), by_prediction(judged)
    chosen = [best]
    for group in (families, judged):
        chosen += [one for one in group if _is_new(one, chosen)][:1]
    return _each_once([*chosen, *by_prediction((*families, *judged))])[:count]


def with_first(plan: AnyPlan, others: Sequence[Candidate], most: int) -> list[Candidate]:
    """`plan`, and those of `others` that differ from it and from each other, in this order: at most `most` in all."""
    return _each_once([Candidate(BEST, plan), *others])[:most]


def _of_families(task: Task, deadline: Deadline) -> Iterator[Candidate]:
    """The best plan of every family that has one, with the task's own pins. None once time is over."""
    for family in FAMILIES:
        if deadline.left <= 0.0:
            return
        try:
            varied = replace(task.varied(Variant(family=family)), pins=task.pins)
            plan = search_plan(varied, deadline)
        except InfeasibleError:
            continue
        if is_of_family(plan, family):
            yield Candidate(family.name, plan)


def by_prediction(group: Sequence[Candidate]) -> list[Candidate]:
    """The fastest first."""
    return sorted(group, key=lambda one: one.plan.step_time)


def _each_once(group: Iterable[Candidate]) -> list[Candidate]:
    chosen: list[Candidate] = []
    for one in group:
        if _is_new(one, chosen):
            chosen.append(one)
    return chosen


def _is_new(one: Candidate, chosen: Sequence[Candidate]) -> bool:
    return not any(_same(one.plan, other.plan) for other in chosen)


def _same(mine: AnyPlan, other: AnyPlan) -> bool:
    if isinstance(mine, PipelinePlan) or isinstance(other, PipelinePlan):
        return mine.fingerprint == other.fingerprint
    if mine.parameter_layouts != other.parameter_layouts or _moves(mine) != _moves(other):
        return False
    return abs(mine.step_time - other.step_time) <= _APART * other.step_time


def _moves(plan: Plan) -> list[tuple[object, ...]]:
    return [(c.phase, c.name, c.axes, c.nbytes, c.value) for c in collectives_of(plan.records)]
