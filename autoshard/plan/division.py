"""How a call is divided: its batch into pieces, its model into stages along which axis; and its fastest plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoshard.plan.micro_batches import cut_call, fastest_in_pieces, fastest_of, most_pieces
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_cache import Candidate, by_prediction, cached_candidates, cached_search, with_first
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
) -> Plan:
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
    best: Plan | None = None
    reason: InfeasibleError | None = None
    ways: list[Callable[[Deadline], Plan]] = [without]
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

    def fastest(self, task: Task, deadline: Deadline, search: Search = search_plan) -> Plan:
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


def racers(best: Plan, task: Task, division: Division, count: int) -> list[Candidate]:
    """`best`, and at most `count` - 1 others of the whole call `task`, divided as `division` allows.

    Of a plan without stages, in pieces or not, those that `candidates` finds of the call in as many pieces. Of one with
    stages the fastest by each other schedule, in as many pieces, by prediction. Where stages are "auto" the fastest of
    the other kind, along any axis or without stages, is before these, and the rest of that kind behind. Fewer where
    `task.time_limit` ends first.
    """
    until = Deadline.after(task.time_limit)
    if best.axis:
        alike = _in_stages(best, task, division, until)
    else:
        cut = cut_call(task.captured, best.micro_batches, best.head_pieces)
        alike = cached_candidates(replace(task, captured=cut), count)
    others = by_prediction(_of_other_kind(best, task, division, until))
    return with_first(best, [*others[:1], *alike, *others[1:]], count)


def _in_stages(best: Plan, task: Task, division: Division, until: Deadline) -> list[Candidate]:
    names = ORDERS if division.schedule is None and trains(task.joint) else ()
    ways: dict[str, Callable[[Deadline], Plan]] = {
        name: lambda share, name=name: plan_stages(task, best.axis, best.micro_batches, share, name)
        for name in names
        if name != best.schedule
    }
    return by_prediction(list(_planned(ways, until)))


def _of_other_kind(best: Plan, task: Task, division: Division, until: Deadline) -> list[Candidate]:
    if division.stages != "auto":
        return []
    ways: dict[str, Callable[[Deadline], Plan]] = {
        f"stages along {axis}": lambda share, axis=axis: replace(division, stages=axis).fastest(task, share)
        for axis in task.mesh.real_axes()
        if axis != best.axis
    }
    if best.axis:
        whole = replace(division, stages=None, schedule=None)
        ways["without stages"] = lambda share: whole.fastest(task, share, cached_search)
    return list(_planned(ways, until))


def _planned(ways: dict[str, Callable[[Deadline], Plan]], until: Deadline) -> Iterator[Candidate]:
    """By name, those that there are. None once time is over; each has its share of what is left."""
    for place, (name, way) in enumerate(ways.items()):
        if until.left <= 0.0:
            return
        try:
            yield Candidate(name, way(until.share(1.0 / (len(ways) - place))))
        except InfeasibleError:
            continue
