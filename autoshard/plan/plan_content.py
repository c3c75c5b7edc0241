"""What plans hold: the data that their files, checks and explanations read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from autoshard.plan.plan_memory import MemoryTimeline
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices
from autoshard.version import __version__
from cost_model.errors import Count, PlanError, Seconds, Text
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.timed import TimedPrices
from passes.ir.joint import JointGraph
from passes.layout.layout import JoinedAxes, Layout
from passes.plan.describe import graph_hash
from passes.plan.planned_graph import Collective, NodeRecord, PlannedGraph
from passes.predict.predict_step import StageFigures
from passes.predict.prediction import TimelinePart
from passes.search.search_space import ALIKE
from passes.stages.pipeline_orders import ORDERS, PipelineTimeline, pipeline_order


class PlanOrigin(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was found for and with.

    profile, profile_hash, nominal: the prices; nominal ones were never measured.
    graph_hash: of the canonical joint graph. autoshard, torch: versions. timed: hash of the kernels and collectives
    whose times took the place of modelled prices; "": none, the plan is unrefined. optimizer: by its name in
    `cost_model.memory.OPTIMIZERS`, whose states and update are counted; "": none, or an older file does not say.
    routing: a factor, or rows by expert as shares (`passes.ir.routing`); (): experts are equally loaded.
    """

    profile: Text
    profile_hash: Text
    nominal: bool
    graph_hash: Text
    autoshard: Text
    torch: Text
    timed: Text = ""
    optimizer: Text = ""
    routing: tuple[float, ...] = ()

    @staticmethod
    def of(
        profile: Profile, joint: JointGraph, optimizer: str, timed: TimedPrices | None = None
    ) -> PlanOrigin:
        """optimizer: that is counted where something is trained. timed: what took the place of modelled prices, if
        anything did."""
        return PlanOrigin(
            profile=profile.name,
            profile_hash=profile.hash(),
            nominal=profile.nominal,
            graph_hash=graph_hash(joint),
            autoshard=__version__,
            torch=torch.__version__,
            timed="" if timed is None else timed.hash,
            optimizer=optimizer if joint.trained else "",
            routing=joint.routing.numbers,
        )


class Raced(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan that ran for a few real steps. name: how it was found. words: the plan in a line. predicted, measured:
    seconds of a step; measured: of the slowest rank, its median."""

    name: Text
    words: Text
    predicted: Seconds
    measured: Seconds


class Rehearsed(Struct, frozen=True, forbid_unknown_fields=True):
    """Real steps of a plan. modelled: seconds of a step under modelled and timed prices. measured: of the slowest rank,
    its median. busy: of stages, the share of all ranks' time in which they computed; None where it was not measured."""

    modelled: Annotated[float, Meta(gt=0.0, le=1e30)]
    measured: Annotated[float, Meta(gt=0.0, le=1e30)]
    busy: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None


class Nearly(Struct, frozen=True, forbid_unknown_fields=True):
    """The fastest program that the search judged of those whose pattern is another. pattern: its words, of the axes on
    which it differs. slower, computed: how much longer its step takes, and what it computes in it, as shares of the
    plan's step; the rest is communication that is not hidden, and what packs it."""

    pattern: dict[Text, Text]
    slower: Annotated[float, Meta(ge=0.0, le=1e30)]
    computed: Annotated[float, Meta(ge=-1e30, le=1e30)]


def pace_of(rehearsed: Rehearsed | None) -> float:
    """How many times as long as modelled a step took: all seconds of the plan are times that."""
    return 1.0 if rehearsed is None else rehearsed.measured / rehearsed.modelled


Position = Annotated[int, Meta(ge=0, lt=1_000_000_000)]
"""Of an input or output of a call."""


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage. reads, returns: the call's tensor inputs and outputs that it reads and returns, by position. sent,
    returned: seconds of what passes to the next stage for a piece, and back; 0 of the last. plan: of its graph."""

    reads: tuple[Position, ...]
    returns: tuple[Position, ...]
    figures: StageFigures
    sent: Seconds
    returned: Seconds
    plan: Any


@dataclass(frozen=True, kw_only=True)
class PlanContent:
    """A plan as data, in the order of its file. `autoshard.Plan` says what each field is, and what can be done with
    it; `autoshard.PipelinePlan` does so of one with stages, all of whose figures follow from them (`of_stages`)."""

    mesh: MeshSpec
    origin: PlanOrigin
    cost: float
    lower_bound: float
    status: Annotated[str, Meta(pattern="^(optimal|feasible)$")]
    step_time: float
    peak_memory: Count
    peak_node: Text
    memory_limit: Count | None
    reserve: Count
    parameter_layouts: Mapping[Text, Layout]
    inputs: Mapping[Position, Layout]
    outputs: Mapping[Position, Layout | None]
    fallbacks: tuple[Text, ...]
    joined_axes: JoinedAxes = ()
    moved_nbytes: Count | None = None
    race: tuple[Raced, ...] = ()
    rehearsed: Rehearsed | None = None
    # A file holds its outline: no plan is another for that.
    memory: MemoryTimeline | None = field(default=None, compare=False)
    ran: tuple[TimelinePart, ...] = field(default=(), compare=False)
    # Of the search, not of the plan.
    nearly: Nearly | None = field(default=None, compare=False)
    micro_batches: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    head_pieces: Annotated[int, Meta(ge=1, le=1_000)] = 1
    most_gain: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    records: tuple[NodeRecord, ...] = ()
    other_sizes: tuple[tuple[NodeRecord, ...], ...] = ()
    axis: Text = ""
    schedule: Annotated[str, Meta(pattern=f"^({'|'.join(ORDERS)})$")] = ""
    cut: tuple[Text, ...] = ()
    bound_of_cut: Seconds | None = None
    parts: Annotated[tuple[Part, ...], Meta(max_length=10_000)] = ()

    @property
    def stages(self) -> tuple[PlanContent, ...]:
        """Without an axis of stages it is its only one."""
        return tuple(part.plan for part in self.parts) or (self,)

    @property
    def gap(self) -> float:
        """How far the cost may be above the least there is, as a share of it; with `joined_axes`, above the least of
        plans that use those together."""
        return gap_of(self.cost, self.lower_bound)

    @property
    def latency_decides(self) -> bool:
        """Whether no plan is 2 % faster than one in which every rank does all the work."""
        return self.most_gain is not None and self.most_gain <= ALIKE

    @cached_property
    def planned(self) -> PlannedGraph:
        """Of the step with the first piece; of stages each has its own."""
        return PlannedGraph(self.records)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step, in order, stage by stage; what passes between stages is none."""
        return tuple(c for stage in self.stages for c in stage.planned.collectives)

    @property
    def ranks(self) -> int:
        """Along `axis`. PlanError of a plan without stages, as of all that asks for them."""
        if not self.axis:
            raise PlanError(
                "the plan has no stages, and so no schedule of them\n"
                "  try: plan.explain(), or find_plan(..., stages=...) with the name of a mesh axis"
            )
        return self.mesh.size(self.axis)

    @property
    def stages_per_rank(self) -> int:
        return len(self.parts) // self.ranks

    @cached_property
    def scheduled(self) -> Scheduled:
        """Its stages under its schedule."""
        return scheduled_parts(self.ranks, self.schedule, self.micro_batches, self.parts)

    @property
    def timeline(self) -> PipelineTimeline:
        """When each rank runs which stage's forward and backward of which piece."""
        return self.scheduled.timeline

    @property
    def bubble(self) -> float:
        return self.timeline.bubble

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for number, stage in enumerate(self.stages):
            for name in stage.parameter_layouts:
                found.setdefault(name, set()).add(number % self.ranks)
        return {name: tuple(sorted(places)) for name, places in found.items()}

    @cached_property
    def returned_by(self) -> dict[int, int]:
        """Tensor output of the call -> the stage that returns it."""
        return {position: stage for stage, part in enumerate(self.parts) for position in part.returns}


def gap_of(cost: float, bound: float) -> float:
    return 0.0 if cost <= 0 else max(0.0, (cost - bound) / cost)


def scheduled_parts(ranks: int, schedule: str, micro_batches: int, parts: Sequence[Part]) -> Scheduled:
    """ranks: along the axis of stages. InfeasibleError where the schedule cannot run so many pieces."""
    own = parts[:-1]
    order = pipeline_order(schedule, ranks, micro_batches, stages_per_rank=len(parts) // ranks)
    passed = tuple(part.sent for part in own), tuple(part.returned for part in own)
    return Scheduled(order, SchedulePrices(tuple(part.figures for part in parts), *passed))
