"""How a call is divided: its batch into pieces, its model into stages along which axis; and its fastest plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.plan.micro_batches import fastest_in_pieces, fastest_of, most_pieces
from autoshard.plan.plan import AnyPlan, PipelinePlan, Plan
from autoshard.plan.plan_stages import check_stages, plan_stages
from autoshard.plan.task import Task, search_plan
from cost_model.checked_arguments import reject
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, ShardingError
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.micro_batches.time_axis import trains
from passes.stages.pipeline_orders import ORDERS

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


Search = Callable[[Task, Deadline], Plan]


@dataclass(frozen=True)
class Division:
    """What `find_plan` was asked for, checked.

    micro_batches: pieces, or "auto". stages: the axis that holds stages, "auto", or None. schedule: the only one that
    may run stages; None: any."""

    micro_batches: int | str = 1
    stages: str | None = None
    schedule: str | None = None

    def leaves_whole(self, memory_limit: int | None) -> bool:
        """Whether a call within this limit is run as one: "auto" tries pieces only where the whole may not fit."""
        return self.stages is None and (
            self.micro_batches == 1 or (self.micro_batches == "auto" and memory_limit is None)
        )

    def fastest(self, task: Task, deadline: Deadline, search: Search = search_plan) -> AnyPlan:
        """The fastest plan of the whole call `task`, divided so. search: of a call without stages that is cut, or
        whole. Raises InfeasibleError."""
        pieces = self.micro_batches

        def planned(cut: Captured, until: Deadline) -> Plan:
            return search(replace(task, captured=cut), until)

        def without_stages(until: Deadline) -> Plan:
            return fastest_in_pieces(task.captured, pieces, task.memory_limit, planned, until)

        if self.stages is None:
            return without_stages(deadline)
        return fastest_of_stages(task, self.stages, pieces, without_stages, deadline, self.schedule)


WHOLE = Division()
"""Neither in pieces nor in stages."""
