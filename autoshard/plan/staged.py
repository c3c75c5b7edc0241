"""One cut of a call: its stages planned, in order, and the fastest schedule of them that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.plan.equal_stages import plan_like
from autoshard.plan.plan import Plan
from autoshard.plan.stage_cut import transfer_price
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices
from autoshard.plan.stage_tasks import PlannedStage, sent_nbytes, stage_task
from autoshard.plan.task import Task, search_plan
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from cost_model.units import format_bytes
from passes.ir.joint import JointGraph
from passes.stages.pipeline_orders import PipelineOrder, in_flight
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs

__all__ = ["Staged"]

Stages = tuple[PlannedStage, ...]


@dataclass
class Staged:
    """joint: of the call, in pieces. task: of the whole mesh. cut: of as many stages as are planned. search: the plan
    of a stage's task, by its number and until when; it raises InfeasibleError."""

    task: Task
    axis: str
    joint: JointGraph
    cut: tuple[str, ...]
    deadline: Deadline
    search: Callable[[Task, int, Deadline], Plan] = lambda task, stage, until: search_plan(task, until)
    planned: dict[tuple[tuple[int, int | None], ...], Stages] = field(default_factory=dict)

    @cached_property
    def graphs(self) -> tuple[StageGraph, ...]:
        return stage_graphs(self.joint, self.cut)

    @cached_property
    def free(self) -> Stages:
        """Planned as if memory were no matter."""
        return self._planned([(1, None)] * len(self.graphs))

    def best(
        self, orders: Sequence[PipelineOrder], faster_than: float = math.inf
    ) -> tuple[Scheduled, Stages] | None:
        """The fastest of these schedules that fits; None if none can be faster than so many seconds.

        Stages planned as if memory were no matter say how fast each schedule can be at most. They are tried in that
        order; where what they hold does not fit, stages are planned again, with room for what each keeps in flight.
        Raises InfeasibleError, and says which stage.
        """
        found: tuple[Scheduled, Stages] | None = None
        reason: InfeasibleError | None = None
        for one in sorted((self._scheduled(self.free, order) for order in orders), key=lambda s: s.seconds):
            if one.seconds >= (faster_than if found is None else found[0].seconds):
                break
            try:
                stages = self.free if self._fits(one) else self._within(one)
            except InfeasibleError as error:
                reason = reason or error
                continue
            one = self._scheduled(stages, one.order)
            if not self._fits(one):
                reason = reason or self._too_full(one)
            elif found is None or one.seconds < found[0].seconds:
                found = one, stages
        if found is None and reason is not None:
            raise reason
        return found

    def _within(self, free: Scheduled) -> Stages:
        """Stages of a rank share its memory as those planned without a limit would."""
        limit = self.task.memory_limit
        assert limit is not None
        reserve = self.task.reserve((), None)
        flights = in_flight(free.order)
        wanted = [
            stage.peak + (flight - 1) * stage.kept
            for stage, flight in zip(free.prices.stages, flights, strict=True)
        ]
        ranks = len(free.order.ranks)
        shares = [nbytes / max(1, sum(wanted[i % ranks :: ranks])) for i, nbytes in enumerate(wanted)]
        room = [reserve + int((limit - reserve) * share) for share in shares]
        return self._planned(list(zip(flights, room, strict=True)))

    def _planned(self, asked: Sequence[tuple[int, int | None]]) -> Stages:
        """asked: of each stage the pieces that it keeps at once, and its memory limit."""
        key = tuple(asked)
        if key not in self.planned:
            done: list[PlannedStage] = []
            for graph, (flight, limit) in zip(self.graphs, asked, strict=True):
                done.append(self._stage(graph, done, flight, limit, asked))
            self.planned[key] = tuple(done)
        return self.planned[key]

    def _stage(
        self,
        graph: StageGraph,
        done: Sequence[PlannedStage],
        flight: int,
        limit: int | None,
        asked: Sequence[tuple[int, int | None]],
    ) -> PlannedStage:
        task = replace(stage_task(self.task, self.axis, graph, done, flight), memory_limit=limit)
        for earlier in reversed(done):
            same = asked[earlier.graph.stage] == (flight, limit) and earlier.task.boundary == task.boundary
            plan = plan_like(task, earlier.plan, earlier.graph.joint) if same else None
            if plan is not None:
                return replace(earlier, graph=graph, task=task, plan=plan)
        try:
            until = self.deadline.share(1.0 / (len(self.graphs) - graph.stage))
            plan = self.search(task, graph.stage, until)
        except InfeasibleError as error:
            raise InfeasibleError(
                f"stage {graph.stage} of {graph.stages} ({_modules(graph)}): {error}"
            ) from None
        return PlannedStage.of(graph, task, plan)

    def _scheduled(self, stages: Stages, order: PipelineOrder) -> Scheduled:
        price = transfer_price(self.task, self.axis)
        passing = [sent_nbytes(stage) for stage in stages[:-1]]
        sent, returned = (tuple(price(nbytes[way]) for nbytes in passing) for way in (0, 1))
        return Scheduled(order, SchedulePrices(tuple(stage.figures for stage in stages), sent, returned))

    def _fits(self, one: Scheduled) -> bool:
        limit = self.task.memory_limit
        return limit is None or max(one.peaks) + self.task.reserve((), None) <= limit

    def _too_full(self, one: Scheduled) -> InfeasibleError:
        limit, needed = self.task.memory_limit, max(one.peaks) + self.task.reserve((), None)
        assert limit is not None
        rank = one.peaks.index(max(one.peaks))
        stages = ", ".join(str(stage) for stage in range(rank, len(self.graphs), len(one.peaks)))
        return InfeasibleError(
            f"no plan fits memory_limit={format_bytes(limit)} per device: with the schedule {one.order.name!r} "
            f"the ranks of stage {stages} hold {format_bytes(needed)}\n"
            f"  try: memory_limit={format_bytes(needed)}, more and smaller micro_batches, or more devices"
        )


def _modules(graph: StageGraph) -> str:
    """The first and the last module of the model that a stage's forward runs."""
    names = [
        node.meta["module"]
        for node in graph.joint.graph.nodes
        if node.op == "call_function" and node.meta.get("phase") == "forward" and node.meta.get("module")
    ]
    return f"{names[0]} to {names[-1]}" if names else "no module"
