"""What of a plan in pieces or in stages is timed: its distinct kernels and collectives, whichever stage has them, and
a few known kernels of the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.plan.micro_batches import cut_call
from autoshard.plan.pipeline_plan import PipelinePlan
from autoshard.plan.plan import Plan
from autoshard.plan.stages_option import AnyPlan
from autoshard.plan.task import Task
from autoshard.refine.timed_cases import Case, TimedCandidate, distinct, timed_again, untimed_cases

__all__ = ["again_of_parts", "untimed_of_parts"]


def untimed_of_parts(plan: AnyPlan, task: Task) -> list[Case]:
    """What `task.timed` does not know, each once; what takes most of a piece first. task: of the whole call."""
    found: dict[object, Case] = {}
    for part, own in _parts(plan, task):
        for case in untimed_cases(_piece(plan, part), own):
            found.setdefault(distinct(case), case)
    return sorted(found.values(), key=lambda case: -case.seconds)


def again_of_parts(plan: AnyPlan, task: Task) -> tuple[Case, ...]:
    """A few kernels of the first part that `task.timed` knows."""
    part, own = next(_parts(plan, task))
    return timed_again(_piece(plan, part), own)


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
