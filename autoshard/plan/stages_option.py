"""`stages`: whether a mesh axis holds stages of the model, and which; with how many pieces each is fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from autoshard.plan.micro_batches import fastest_of, most_pieces
from autoshard.plan.plan import AnyPlan, PipelinePlan, Plan
from autoshard.plan.plan_stages import check_stages, plan_stages
from autoshard.plan.task import Task
from cost_model.checked_arguments import reject
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, ShardingError
from cost_model.mesh import MeshSpec
from passes.micro_batches.time_axis import trains
from passes.stages.pipeline_orders import ORDERS

__all__ = ["checked_schedule", "checked_stages", "fastest_of_stages", "pipeline_in_pieces"]

_log = logging.getLogger("autoshard")


def checked_stages(stages: object, mesh: MeshSpec) -> str | None:
    """The axis that holds stages, "auto", or None. ShardingError for anything else."""
    if stages is None or stages == "auto":
        return stages  # type: ignore[return-value]
    if not isinstance(stages, str):
        raise reject("stages", stages, "the name of a mesh axis, 'auto', or None")
    check_stages(mesh, stages)
    return stages


def checked_schedule(schedule: object, stages: str | None) -> str | None:
    """The only schedule that may run the stages; None: any. ShardingError for anything else, or without stages."""
    if schedule is None:
        return None
    if not isinstance(schedule, str) or schedule not in ORDERS:
        raise reject("schedule", schedule, ", ".join(map(repr, ORDERS)) + " or None")
    if stages is None:
        raise ShardingError(
            f"schedule is {schedule!r}, and there are no stages\n  try: stages='pp', or schedule=None"
        )
    return schedule


def fastest_of_stages(
    task: Task,
    stages: str,
    micro_batches: int | str,
    without: Callable[[Deadline], Plan],
    deadline: Deadline,
    schedule: str | None = None,
) -> AnyPlan:
    """The plan with stages along the axis `stages`; of "auto", the fastest that fits: without, or along any axis.

    without: the plan with no stages. schedule: the only one that may run stages; None: any. Raises InfeasibleError.
    """
    if stages != "auto":
        if micro_batches == 1 and trains(task.joint):
            _log.warning(
                "stages=%r with micro_batches=1: one stage computes at a time\n"
                "  try: micro_batches='auto', or twice the number of stages",
                stages,
            )
        return pipeline_in_pieces(task, stages, micro_batches, deadline, schedule)
    axes = task.mesh.real_axes()
    best: AnyPlan | None = None
    reason: InfeasibleError | None = None
    ways: list[Callable[[Deadline], AnyPlan]] = [without]
    ways += [
        lambda until, axis=axis: pipeline_in_pieces(task, axis, micro_batches, until, schedule)
        for axis in axes
    ]
    for place, way in enumerate(ways):
        if best is not None and deadline.left <= 0.0:
            break
        try:
            found = way(deadline.share(1.0 / (len(ways) - place)))
        except InfeasibleError as error:
            reason = reason or error
            continue
        if best is None or found.step_time < best.step_time:
            best = found
    if best is None:
        assert reason is not None
        raise reason
    return best


def pipeline_in_pieces(
    task: Task, axis: str, micro_batches: int | str, deadline: Deadline, schedule: str | None = None
) -> PipelinePlan:
    """In so many pieces; of "auto", the fastest of 1, 2, 4 ... times the number of stages that fits: it looks no
    further once a plan in more pieces is slower. Raises InfeasibleError."""
    if micro_batches != "auto":
        return plan_stages(task, axis, int(micro_batches), deadline, schedule)
    counts = _counts(task, axis)

    def planned(count: int) -> PipelinePlan:
        until = deadline.share(1.0 / (len(counts) - counts.index(count)))
        return plan_stages(task, axis, count, until, schedule)

    return fastest_of(counts, planned, deadline)


def _counts(task: Task, axis: str) -> Sequence[int]:
    """More pieces than samples there are not; fewer than stages only where there is no more."""
    most, ranks = most_pieces(task.captured), task.mesh.size(axis)
    if not trains(task.joint):
        return (1,)
    return tuple(_doubled(ranks, most)) or (most,)


def _doubled(count: int, most: int) -> Iterator[int]:
    while count <= most:
        yield count
        count *= 2
