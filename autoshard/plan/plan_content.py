"""What a plan holds: the data that its file, its checks and its explanations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

from autoshard.plan.plan_memory import MemoryTimeline
from cost_model.mesh import MeshSpec
from cost_model.text_files import Count, Seconds, Text
from passes.layout.joined_axes import JoinedAxes
from passes.layout.layout import Layout
from passes.plan.records import NodeRecord

__all__ = ["PlanContent", "PlanOrigin", "Position", "Raced", "Rehearsed", "pace_of"]

Position = Annotated[int, Meta(ge=0, lt=1_000_000_000)]
"""Of an input or output of a call."""


class PlanOrigin(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan was found for and with.

    profile, profile_hash, nominal: the prices; nominal ones were never measured.
    graph_hash: of the canonical joint graph. autoshard, torch: versions. timed: hash of the kernels and collectives
    whose times took the place of modelled prices; "": none, the plan is unrefined. optimizer: by its name in
    `cost_model.memory.OPTIMIZERS`, whose states and update are counted; "": none, or an older file does not say.
    """

    profile: Text
    profile_hash: Text
    nominal: bool
    graph_hash: Text
    autoshard: Text
    torch: Text
    timed: Text = ""
    optimizer: Text = ""


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


def pace_of(rehearsed: Rehearsed | None) -> float:
    """How many times as long as modelled a step took: all seconds of the plan are times that."""
    return 1.0 if rehearsed is None else rehearsed.measured / rehearsed.modelled


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
    def gap(self) -> float:
        """How far the cost may be above the least there is, as a share of it; with `joined_axes`, above the least of
        plans that use those together."""
        return 0.0 if self.cost <= 0 else max(0.0, (self.cost - self.lower_bound) / self.cost)
