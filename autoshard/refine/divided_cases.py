"""What of a plan in pieces or in stages is timed: its distinct kernels and collectives, whichever stage has them, and
a few known kernels of the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import AnyPlan, PipelinePlan, Plan
from autoshard.plan.task import Task
from autoshard.refine.timed_cases import Case, Cases, TimedCandidate, cases_of, distinct

__all__ = ["cases_of_parts"]


def cases_of_parts(plan: AnyPlan, task: Task) -> Cases:
    """What `task.timed` does not know, each once, what takes most of a piece first; again: of the first part. task: of
    the whole call."""
    parts = [cases_of(_piece(plan, part), own) for part, own in _parts(plan, task)]
    found: dict[object, Case] = {}
    for case in chain.from_iterable(cases.unknown for cases in parts):
        found.setdefault(distinct(case), case)
    instead = chain.from_iterable(cases.instead for cases in parts)
    return Cases((*sorted(found.values(), key=lambda case: -case.seconds), *instead), parts[0].again)


def _piece(plan: AnyPlan, part: Plan) -> TimedCandidate:
    """Most of what a part runs, it runs once for each piece."""
    return TimedCandidate(plan.step_time / plan.micro_batches, part.assignment, part.lowering)


def _parts(plan: AnyPlan, task: Task) -> Iterator[tuple[Plan, Task]]:
    """Each stage, or the whole, with its task."""
    captured = task.captured
    if isinstance(plan, Plan):
        yield plan, replace(task, captured=cut_call(captured, plan.micro_batches, plan.head_pieces))
        return
    assert isinstance(plan, PipelinePlan)
    for stage, graph in zip(plan.stages, plan.stage_graphs(captured.joint), strict=True):
        own = replace(captured, joint=graph.joint)
        yield stage, replace(task, captured=own, mesh=stage.mesh, links=task.mesh)
