"""The plans that race one that is found already: as it divides the call, and otherwise where that was left open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoshard.plan.candidates import Candidate, by_prediction, with_first
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import AnyPlan, PipelinePlan
from autoshard.plan.plan_cache import cached_candidates, cached_search
from autoshard.plan.plan_stages import plan_stages
from autoshard.plan.stages_option import Division
from autoshard.plan.task import Task
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from passes.micro_batches.time_axis import trains
from passes.stages.pipeline_orders import ORDERS


def racers(best: AnyPlan, task: Task, division: Division, count: int) -> list[Candidate]:
    """`best`, and at most `count` - 1 others of the whole call `task`, divided as `division` allows.

    Of a plan without stages, in pieces or not, those that `candidates` finds of the call in as many pieces. Of one with
    stages the fastest by each other schedule, in as many pieces, by prediction. Where stages are "auto" the fastest of
    the other kind, along any axis or without stages, is before these, and the rest of that kind behind. Fewer where
    `task.time_limit` ends first.
    """
    until = Deadline.after(task.time_limit)
    if isinstance(best, PipelinePlan):
        alike = _in_stages(best, task, division, until)
    else:
        cut = cut_call(task.captured, best.micro_batches, best.head_pieces)
        alike = cached_candidates(replace(task, captured=cut), count)
    others = by_prediction(_of_other_kind(best, task, division, until))
    return with_first(best, [*others[:1], *alike, *others[1:]], count)


def _in_stages(best: PipelinePlan, task: Task, division: Division, until: Deadline) -> list[Candidate]:
    names = ORDERS if division.schedule is None and trains(task.joint) else ()
    ways: dict[str, Callable[[Deadline], AnyPlan]] = {
        name: lambda share, name=name: plan_stages(task, best.axis, best.micro_batches, share, name)
        for name in names
        if name != best.schedule
    }
    return by_prediction(list(_planned(ways, until)))


def _of_other_kind(best: AnyPlan, task: Task, division: Division, until: Deadline) -> list[Candidate]:
    if division.stages != "auto":
        return []
    ways: dict[str, Callable[[Deadline], AnyPlan]] = {
        f"stages along {axis}": lambda share, axis=axis: replace(division, stages=axis).fastest(task, share)
        for axis in task.mesh.real_axes()
        if not isinstance(best, PipelinePlan) or axis != best.axis
    }
    if isinstance(best, PipelinePlan):
        whole = replace(division, stages=None, schedule=None)
        ways["without stages"] = lambda share: whole.fastest(task, share, cached_search)
    return list(_planned(ways, until))


def _planned(ways: dict[str, Callable[[Deadline], AnyPlan]], until: Deadline) -> Iterator[Candidate]:
    """By name, those that there are. None once time is over; each has its share of what is left."""
    for place, (name, way) in enumerate(ways.items()):
        if until.left <= 0.0:
            return
        try:
            yield Candidate(name, way(until.share(1.0 / (len(ways) - place))))
        except InfeasibleError:
            continue
