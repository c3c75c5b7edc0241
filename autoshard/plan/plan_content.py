"""What plans hold: the data that their files, checks and explanations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from msgspec import Meta, Struct

from autoshard.plan.plan_memory import MemoryTimeline
from autoshard.plan.plan_origin import PlanOrigin, Raced, Rehearsed
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices, pipeline_memory
from cost_model.checked_arguments import Count, Seconds, Text
from cost_model.mesh import MeshSpec
from passes.layout.joined_axes import JoinedAxes
from passes.layout.layout import Layout
from passes.plan.records import NodeRecord
from passes.predict.predict_stage import StageFigures
from passes.stages.pipeline_orders import ORDERS, pipeline_order
from passes.stages.pipeline_timeline import PipelineTimeline

Position = Annotated[int, Meta(ge=0, lt=1_000_000_000)]
"""Of an input or output of a call."""


@dataclass(frozen=True, kw_only=True)
class PlanContent:
    """A plan as data, in the order of its file. `autoshard.Plan` says what each field is, and what can be done with
    it."""

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
    micro_batches: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    head_pieces: Annotated[int, Meta(ge=1, le=1_000)] = 1
    records: tuple[NodeRecord, ...]
    other_sizes: tuple[tuple[NodeRecord, ...], ...] = ()

    @property
    def stages(self) -> tuple[PlanContent, ...]:
        """It is its only one."""
        return (self,)

    @property
    def gap(self) -> float:
        """How far the cost may be above the least there is, as a share of it; with `joined_axes`, above the least of
        plans that use those together."""
        return 0.0 if self.cost <= 0 else max(0.0, (self.cost - self.lower_bound) / self.cost)


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
class PipelineContent:
    """Stages of one model on the ranks along a mesh axis. `autoshard.PipelinePlan` says what can be done with it.

    mesh:          the whole mesh, of which `axis` holds the stages. Stage s is at coordinate s mod its size.
    schedule:      one of `ORDERS` in `passes.stages.pipeline_orders`. micro_batches: pieces of a batch.
    cut:           the op of the call's graph in pieces with which each stage but the first begins.
    parts:         the stages, in order; everything below is derived from their seconds and bytes.
    reserve:       bytes of a GPU that no tensor can have.
    race, rehearsed: as of `Plan`.
    bound_of_cut:  the cut's longest stage, as it was estimated, is at most so much longer, as a share, than that of any
                   cut into as many stages; None of a later kind of call, whose cut follows from the parameters.

    step_time:     predicted seconds of a step, all stages on one timeline. bubble: the share of it in which ranks wait.
    cost, lower_bound: `step_time`, and what the search counts for the stages of the busiest rank at least, if it never
                   waits: for any plans of these stages that pass the same between them, without a limit.
                   gap: (cost - lower_bound) / cost, so the bubble is in it. Of other cuts
                   `bound_of_cut` alone is said, of other numbers of pieces nothing.
    peak_memory:   predicted bytes on the fullest rank: what its stages hold and keep in flight, and one piece makes.
    memory:        those bytes at each action of that rank, by kind, and what lives at the peak (docs/pipeline.md); None
                   where that of one of its stages is not known.
    holders:       parameter name -> coordinates along `axis` of the ranks that hold it, several where stages share it.
    """

    mesh: MeshSpec
    origin: PlanOrigin
    axis: Text
    schedule: Annotated[str, Meta(pattern=f"^({'|'.join(ORDERS)})$")]
    micro_batches: Annotated[int, Meta(ge=1, le=100_000)]
    cut: tuple[Text, ...]
    inputs: Mapping[Position, Layout]
    memory_limit: Count | None
    reserve: Count
    bound_of_cut: Seconds | None
    race: tuple[Raced, ...] = ()
    rehearsed: Rehearsed | None = None
    parts: Annotated[tuple[Part, ...], Meta(max_length=10_000)]

    @cached_property
    def stages(self) -> tuple[PlanContent, ...]:
        """The plan of each stage's graph on the ranks of one stage: `mesh` with `axis` of size 1."""
        return tuple(part.plan for part in self.parts)

    @property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        return tuple(part.reads for part in self.parts)

    @property
    def returns(self) -> tuple[tuple[int, ...], ...]:
        return tuple(part.returns for part in self.parts)

    @cached_property
    def prices(self) -> SchedulePrices:
        """Seconds and bytes of each stage and each boundary."""
        figures, own = tuple(part.figures for part in self.parts), self.parts[:-1]
        return SchedulePrices(figures, tuple(p.sent for p in own), tuple(p.returned for p in own))

    @property
    def ranks(self) -> int:
        """Along `axis`."""
        return self.mesh.size(self.axis)

    @property
    def stages_per_rank(self) -> int:
        return len(self.stages) // self.ranks

    @cached_property
    def scheduled(self) -> Scheduled:
        order = pipeline_order(
            self.schedule, self.ranks, self.micro_batches, stages_per_rank=self.stages_per_rank
        )
        return Scheduled(order, self.prices)

    @property
    def timeline(self) -> PipelineTimeline:
        """When each rank runs which stage's forward and backward of which piece."""
        return self.scheduled.timeline

    @property
    def step_time(self) -> float:
        return self.timeline.seconds

    @property
    def bubble(self) -> float:
        return self.timeline.bubble

    @property
    def cost(self) -> float:
        return self.step_time

    @property
    def lower_bound(self) -> float:
        own = [self.stages[rank :: self.ranks] for rank in range(self.ranks)]
        return min(self.cost, max(sum(stage.lower_bound for stage in stages) for stages in own))

    @property
    def gap(self) -> float:
        return 0.0 if self.cost <= 0 else (self.cost - self.lower_bound) / self.cost

    @property
    def status(self) -> str:
        """ "optimal" where the bound is met, which a bubble rules out; else "feasible"."""
        return "optimal" if self.gap <= 1e-9 else "feasible"

    @property
    def peak_memory(self) -> int:
        return max(self.scheduled.peaks)

    @cached_property
    def memory(self) -> MemoryTimeline | None:
        return pipeline_memory(self.scheduled, [stage.memory for stage in self.stages])

    @cached_property
    def parameter_layouts(self) -> dict[str, Layout]:
        """By every name that a parameter has."""
        return {name: layout for stage in self.stages for name, layout in stage.parameter_layouts.items()}

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for number, stage in enumerate(self.stages):
            for name in stage.parameter_layouts:
                found.setdefault(name, set()).add(number % self.ranks)
        return {name: tuple(sorted(places)) for name, places in found.items()}

    @cached_property
    def outputs(self) -> dict[int, Layout | None]:
        """Of the call, by position; `returned_by` says by which stage."""
        return {
            position: stage.outputs[index]
            for stage, part in zip(self.stages, self.parts, strict=True)
            for index, position in enumerate(part.returns)
        }

    @cached_property
    def returned_by(self) -> dict[int, int]:
        """Tensor output of the call -> the stage that returns it."""
        return {position: stage for stage, part in enumerate(self.parts) for position in part.returns}

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Ops without a rule, which run replicated in their stage."""
        return tuple(sorted({op for stage in self.stages for op in stage.fallbacks}))


AnyContent = PlanContent | PipelineContent
