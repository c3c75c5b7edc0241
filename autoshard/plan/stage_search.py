"""One cut of a call: its stages planned, in order, and the fastest schedule of them that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import ge

from autoshard.plan.plan import Plan
from autoshard.plan.plan_memory import kind_lines
from autoshard.plan.search_with_states import KnownWholes
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices, fullest_rank, pipeline_memory
from autoshard.plan.stage_tasks import (
    PlannedStage,
    names_alike,
    sending,
    sending_as_received,
    sent_nbytes,
    stage_task,
    transfer_price,
)
from autoshard.plan.task import Task, search_plan
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from cost_model.memory import enough_bytes, format_bytes
from passes.ir.joint import JointGraph
from passes.predict.predict_step import StageFigures
from passes.stages.pipeline_orders import PipelineOrder, in_flight
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs


@dataclass(frozen=True)
class StageNeeds:
    """Bytes of one stage. stays: while others run, what it holds and its pieces in flight keep; runs: more, while it
    runs itself."""

    stays: int
    runs: int

    @staticmethod
    def of(figures: StageFigures, flight: int) -> StageNeeds:
        return StageNeeds(figures.held + flight * figures.kept, figures.running)


def shared_room(limit: int, wanted: Sequence[StageNeeds], planned: Sequence[StageNeeds]) -> int:
    """Bytes for the first of a rank's stages that is not planned yet, itself running.

    wanted: of all its stages, as if memory were no matter; planned: of the first of them, as they are. What is left is
    shared as the others would share it if all of them became smaller alike; one stage runs at a time, so the room in
    which stages run is there once. The last one gets all that is left.
    """
    left, rest = limit - sum(one.stays for one in planned), wanted[len(planned) :]
    runs = max(one.runs for one in rest)
    share = lambda room, of: max(room, 0) * (rest[0].stays + rest[0].runs) // max(1, of)
    room = share(left, sum(one.stays for one in rest) + runs)
    if not planned:
        return room
    # Those that are planned run beside what the others hold.
    beside = left - max(one.runs for one in planned)
    return min(room, share(beside, sum(one.stays for one in rest)))


WORTH = 0.02
"""Share of a step that another schedule, or more stages a rank, must be able to save to be planned."""

_SENT = 0.1
"""Share of a rank's limit that a stage's pieces in flight may take as they are sent, for their layouts to be those of
no limit."""

Stages = tuple[PlannedStage, ...]


@dataclass
class StageSearch:
    """joint: of the call, in pieces. task: of the whole mesh. cut: of as many stages as are planned. search: the plan
    of a stage's task, by its number and until when, and raises InfeasibleError; None: it is searched. wholes: of
    stages, memory aside. within: the memory limit, planned stages by how many pieces each keeps at once. took: seconds
    that the figures of a stage took, the most."""

    task: Task
    axis: str
    joint: JointGraph
    cut: tuple[str, ...]
    deadline: Deadline
    search: Callable[[Task, int, Deadline], Plan] | None = None
    wholes: KnownWholes = field(default_factory=KnownWholes)
    within: dict[tuple[int, ...], Stages] = field(default_factory=dict)
    took: float = 0.0

    @cached_property
    def graphs(self) -> tuple[StageGraph, ...]:
        return stage_graphs(self.joint, self.cut)

    @cached_property
    def alone(self) -> list[int]:
        """Per stage 1, and 0 where an earlier one is alike, whose plan it will most likely have."""
        joints = [graph.joint for graph in self.graphs]
        return [
            int(not place or all(names_alike(joint, other) is None for other in joints[1:place]))
            for place, joint in enumerate(joints)
        ]

    @cached_property
    def free(self) -> Stages:
        """Planned as if memory were no matter."""
        done: list[PlannedStage] = []
        for graph in self.graphs:
            task = stage_task(self.task, self.axis, graph, done)
            done.append(self._stage(graph, replace(task, memory_limit=None), done))
        return tuple(done)

    def best(
        self, orders: Sequence[PipelineOrder], faster_than: float = math.inf
    ) -> tuple[Scheduled, Stages] | None:
        """The fastest of these schedules that fits; None if none can be faster than so many seconds.

        Stages planned as if memory were no matter say how fast each schedule can be at most. They are tried in that
        order; where what they hold does not fit, stages are planned again, with room for what each keeps in flight.
        That takes long, so it is done for no schedule that could save little, or that keeps more in flight than one
        that did not fit. Raises InfeasibleError, and says which stage.
        """
        found: tuple[Scheduled, Stages] | None = None
        refused: list[tuple[tuple[int, ...], InfeasibleError]] = []
        for free in sorted((self._scheduled(self.free, order) for order in orders), key=_rank):
            flights = in_flight(free.order)
            if free.seconds >= (faster_than if found is None else found[0].seconds * (1.0 - WORTH)):
                break
            if refused and self.deadline.over:
                break
            if any(all(map(ge, flights, least)) for least, _ in refused) and not self._fits(free):
                continue
            try:
                one, stages = self._fitting(free)
            except InfeasibleError as error:
                refused.append((flights, error))
                continue
            if found is None or one.seconds < found[0].seconds:
                found = one, stages
        if found is None and refused:
            raise refused[-1][1]
        return found

    def _fitting(self, free: Scheduled) -> tuple[Scheduled, Stages]:
        """Under the schedule of `free`, whose stages are planned as if memory were no matter."""
        if self._fits(free):
            return free, self.free
        stages = self._within(free)
        found = self._scheduled(stages, free.order)
        if not self._fits(found):
            raise self._too_full(found, stages)
        return found, stages

    def _within(self, free: Scheduled) -> Stages:
        """In a rank's memory, less what every plan needs; stages of a rank share it."""
        limit, flights = self.task.memory_limit, in_flight(free.order)
        assert limit is not None
        if flights in self.within:
            return self.within[flights]
        reserve, ranks = self.task.reserve((), None), len(free.order.ranks)
        wanted = list(map(StageNeeds.of, free.prices.stages, flights))
        done: list[PlannedStage] = []
        for graph, flight in zip(self.graphs, flights, strict=True):
            first = graph.stage % ranks
            planned = [
                StageNeeds.of(stage.figures, stage.task.joint.in_flight) for stage in done[first::ranks]
            ]
            room = reserve + shared_room(limit - reserve, wanted[first::ranks], planned)
            task = replace(stage_task(self.task, self.axis, graph, done, flight), memory_limit=room)
            done.append(self._stage(graph, self._sending(task, graph, flights), done))
        self.within[flights] = tuple(done)
        return self.within[flights]

    def _stage(self, graph: StageGraph, task: Task, done: Sequence[PlannedStage]) -> PlannedStage:
        """done: the stages before."""
        alike = self._alike(graph, task, done)
        if alike is not None:
            return alike
        try:
            plan = self._searched(task, graph.stage, self._until(graph.stage))
        except InfeasibleError as error:
            raise _of_stage(error, graph) from None
        started = time.monotonic()
        planned = PlannedStage.of(graph, task, plan)
        self.took = max(self.took, time.monotonic() - started)
        return planned

    def _until(self, stage: int) -> Deadline:
        """Stages still to be searched share the time that is left by the plans of those that are alike: these are put
        on the timeline last, which takes about as long as for one that was searched."""
        alike = len(self.alone) - sum(self.alone)
        others = max(1, sum(self.alone[stage:]))
        # Time for what comes after the searches, but plans of stages that are alike, as a share of that for
        # one.
        return self.deadline.earlier(alike * self.took).share(1.0 / (others + 0.25)).of_each_part.as_part

    def _searched(self, task: Task, stage: int, until: Deadline) -> Plan:
        if self.search is not None:
            return self.search(task, stage, until)
        return search_plan(task, until, wholes=self.wholes)

    def _alike(self, graph: StageGraph, task: Task, done: Sequence[PlannedStage]) -> PlannedStage | None:
        """With the fastest plan of an earlier stage that suits it, and is no slower than that stage."""
        boundary = task.boundary
        searched = [one for one in done if one.like is None and one.task.boundary == boundary]
        for first in sorted(searched, key=lambda one: one.figures.forward + one.figures.backward):
            alike = first.alike(graph, task) if _suits(first, task) else None
            if alike is not None:
                return alike
        return None

    def _sending(self, task: Task, graph: StageGraph, flights: Sequence[int]) -> Task:
        """Sending in the layouts in which it does if memory is no matter, where what is in flight takes little of it
        so; else in those in which it receives, if it receives the like. So stages that are alike stay alike."""
        limit = self.task.memory_limit
        assert limit is not None
        most = max((sent_nbytes(stage)[0] for stage in self.free[:-1]), default=0)
        if max(flights) * most <= _SENT * limit:
            return sending(task, graph, self.free[graph.stage].sent_layouts)
        return sending_as_received(task, graph)

    def _scheduled(self, stages: Stages, order: PipelineOrder) -> Scheduled:
        price = transfer_price(self.task, self.axis)
        passing = [sent_nbytes(stage) for stage in stages[:-1]]
        sent, returned = (tuple(price(nbytes[way]) for nbytes in passing) for way in (0, 1))
        return Scheduled(order, SchedulePrices(tuple(stage.figures for stage in stages), sent, returned))

    def _fits(self, one: Scheduled) -> bool:
        limit = self.task.memory_limit
        return limit is None or max(one.peaks) + self.task.reserve((), None) <= limit

    def _too_full(self, one: Scheduled, planned: Stages) -> InfeasibleError:
        """With what lives there on the fullest rank."""
        limit, needed = self.task.memory_limit, max(one.peaks) + self.task.reserve((), None)
        assert limit is not None
        rank = fullest_rank(one)
        memory = pipeline_memory(one, [stage.plan.memory for stage in planned])
        living = "" if memory is None else "".join(f"    {line}\n" for line in kind_lines(memory))
        stages = ", ".join(str(stage) for stage in range(rank, len(self.graphs), len(one.peaks)))
        return InfeasibleError(
            f"no plan was found that fits memory_limit={format_bytes(limit)} per device: with the schedule "
            f"{one.order.name!r} the ranks of stage {stages} hold {format_bytes(needed)}\n{living}"
            f"  try: memory_limit={enough_bytes(needed)}, more and smaller micro_batches, or more devices"
        )


def _suits(first: PlannedStage, task: Task) -> bool:
    """Whether the plan of `first` is one for `task`, if both compute the same and have the same ends: it fits, as all
    do that were made for no more room, and leaves little unused, if it was made for more in some respect."""
    limit, flight = _limit(task), task.joint.in_flight
    if (
        first.task.joint.in_flight >= flight and _limit(first.task) <= limit
    ):  # it has no more room in any respect
        return True
    # Share of its limit that a stage may leave unused with the plan of one that was given more memory for more
    # in flight, or less for less. Another search takes as long as the first, and would find little more.
    return 0 <= limit - first.needs(flight) <= 0.2 * limit


def _limit(task: Task) -> float:
    return math.inf if task.memory_limit is None else task.memory_limit


def _rank(one: Scheduled) -> tuple[float, int]:
    """The fastest first; of equally fast ones, but for rounding, the one that holds least."""
    return float(f"{one.seconds:.9g}"), max(one.peaks)


def _of_stage(error: InfeasibleError, graph: StageGraph) -> InfeasibleError:
    return InfeasibleError(f"stage {graph.stage} of {graph.stages} ({_modules(graph)}): {error}")


def _modules(graph: StageGraph) -> str:
    """The first and the last module of the model that a stage's forward runs."""
    names = [
        node.meta["module"]
        for node in graph.joint.graph.nodes
        if node.op == "call_function" and node.meta.get("phase") == "forward" and node.meta.get("module")
    ]
    return f"{names[0]} to {names[-1]}" if names else "no module"
