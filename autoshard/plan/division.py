"""How a call is divided: its batch into pieces, its model into stages along which axis; and its fastest plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.plan.micro_batches import cut_call, doubled, fastest_in_pieces, fastest_of, most_pieces
from autoshard.plan.other_sizes import fits_larger, fitting_larger
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import Candidate, by_prediction, cached_candidates, cached_search, with_first
from autoshard.plan.plan_stages import check_stages, plan_stages
from autoshard.plan.task import Task, search_plan
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError, ShardingError, log, reject
from cost_model.mesh import MeshSpec
from passes.stages.pipeline_orders import ORDERS


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


Search = Callable[[Task, Deadline], Plan]
Way = Callable[[Deadline], Plan]


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
        whole. It fits at the largest sizes that the task asks for too. Raises InfeasibleError."""
        found = self._fastest(task, deadline, search)
        # Nobody hears of plans at other sizes.
        until = replace(deadline, watch=None)
        return fitting_larger(task, found, lambda there: self._fastest(there, until, search))

    def _fastest(self, task: Task, deadline: Deadline, search: Search) -> Plan:
        if self.stages != "auto":
            if self.stages is not None and self.micro_batches == 1 and task.joint.trains:
                log.warning(
                    "stages=%r with micro_batches=1: one stage computes at a time\n"
                    "  try: micro_batches='auto', or twice the number of stages",
                    self.stages,
                )
            return self._along(self.stages or "", task, deadline, search)
        reasons: list[InfeasibleError] = []
        found = [plan for _, plan in _planned(self.ways(task, search), deadline, reasons)]
        if not found:
            raise reasons[0]
        return min(found, key=lambda plan: plan.step_time)

    def ways(self, task: Task, search: Search) -> dict[str, Way]:
        """What stages="auto" is the fastest of: without stages, "", or along an axis."""
        along = lambda axis: lambda until: self._along(axis, task, until, search)
        return {axis: along(axis) for axis in ("", *task.mesh.real_axes())}

    def _along(self, axis: str, task: Task, deadline: Deadline, search: Search) -> Plan:
        """In so many pieces; of "auto" in stages, the fastest of 1, 2, 4 ... times their number that fits: it looks no
        further once a plan in more pieces is slower."""
        if not axis:
            planned = lambda cut, until: search(replace(task, captured=cut), until)
            return fastest_in_pieces(task.captured, self.micro_batches, task.memory_limit, planned, deadline)
        if self.micro_batches != "auto":
            return plan_stages(task, axis, int(self.micro_batches), deadline, self.schedule)
        counts = _counts(task, axis)

        def in_stages(count: int, until: Deadline) -> Plan:
            share = until.share(1.0 / (len(counts) - counts.index(count)))
            return plan_stages(task, axis, count, share, self.schedule)

        return fastest_of(counts, in_stages, deadline)


def _counts(task: Task, axis: str) -> Sequence[int]:
    """More pieces than samples there are not; fewer than stages only where there is no more."""
    if not task.joint.trains:
        return (1,)
    most = most_pieces(task.captured)
    return tuple(doubled(task.mesh.size(axis), most)) or (most,)


WHOLE = Division()
"""Neither in pieces nor in stages."""


def racers(best: Plan, task: Task, division: Division, count: int) -> list[Candidate]:
    """`best`, and at most `count` - 1 others of the whole call `task`, divided as `division` allows.

    Of a plan without stages, in pieces or not, those that `candidates` finds of the call in as many pieces. Of one with
    stages the fastest by each other schedule, in as many pieces, by prediction. Where stages are "auto" the fastest of
    the other kind, along any axis or without stages, is before these, and the rest of that kind behind. Fewer where
    `task.time_limit` ends first.
    """
    until = Deadline.after(task.time_limit).firm
    fits = lambda one: fits_larger(task, one.plan)
    planned = lambda ways: by_prediction([Candidate(*one) for one in _planned(ways, until)])
    if best.axis:
        alike = planned(_other_schedules(best, task, division))
    else:
        cut = cut_call(task.captured, best.micro_batches, best.head_pieces)
        alike = cached_candidates(replace(task, captured=cut), count)
    others = planned(_other_kinds(best, task, division))
    return with_first(best, list(filter(fits, [*others[:1], *alike, *others[1:]])), count)


def _other_schedules(best: Plan, task: Task, division: Division) -> dict[str, Way]:
    names = ORDERS if division.schedule is None and task.joint.trains else ()
    return {
        name: lambda share, name=name: plan_stages(task, best.axis, best.micro_batches, share, name)
        for name in names
        if name != best.schedule
    }


def _other_kinds(best: Plan, task: Task, division: Division) -> dict[str, Way]:
    ways = division.ways(task, cached_search) if division.stages == "auto" else {}
    return {
        f"stages along {axis}" if axis else "without stages": way
        for axis, way in ways.items()
        if axis != best.axis
    }


def _planned(
    ways: Mapping[str, Way], until: Deadline, reasons: list[InfeasibleError] | None = None
) -> Iterator[tuple[str, Plan]]:
    """By name, those that there are. None once time is over; each has its share of what is left. reasons: told why
    there are no others; then the first is tried however little time is left."""
    for place, (name, way) in enumerate(ways.items()):
        if until.left <= 0.0 and (place or reasons is None):
            return
        try:
            yield name, way(until.share(1.0 / (len(ways) - place)))
            until = until.firm
        except InfeasibleError as error:
            if reasons is not None:
                reasons.append(error)
