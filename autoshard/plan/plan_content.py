"""What a plan holds: the data that its file, its checks and its explanations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.plan.plan_memory import MemoryTimeline
from cost_model.mesh import MeshSpec
from passes.layout.joined_axes import JoinedAxes
from passes.layout.layout import Layout
from passes.plan.records import NodeRecord

__all__ = ["PlanContent", "PlanOrigin", "Raced", "Rehearsed", "pace_of"]


@dataclass(frozen=True)
class PlanOrigin:
    """What a plan was found for and with.

    profile, profile_hash, nominal: the prices; nominal ones were never measured.
    graph_hash: of the canonical joint graph. autoshard, torch: versions. timed: hash of the kernels and collectives
    whose times took the place of modelled prices; "": none, the plan is unrefined. optimizer: by its name in
    `cost_model.memory.OPTIMIZERS`, whose states and update are counted; "": none, or an older file does not say.
    """

    profile: str
    profile_hash: str
    nominal: bool
    graph_hash: str
    autoshard: str
    torch: str
    timed: str = ""
    optimizer: str = ""


@dataclass(frozen=True)
class Raced:
    """A plan that ran for a few real steps. name: how it was found. words: the plan in a line. predicted, measured:
    seconds of a step; measured: of the slowest rank, its median."""

    name: str
    words: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Rehearsed:
    """Real steps of a plan. modelled: seconds of a step under modelled and timed prices. measured: of the slowest rank,
    its median. busy: of stages, the share of all ranks' time in which they computed; None where it was not measured."""

    modelled: float
    measured: float
    busy: float | None = None


def pace_of(rehearsed: Rehearsed | None) -> float:
    """How many times as long as modelled a step took: all seconds of the plan are times that."""
    return 1.0 if rehearsed is None else rehearsed.measured / rehearsed.modelled


@dataclass(frozen=True)
class PlanContent:
    """A plan as data. `autoshard.Plan` says what each field is, and what can be done with it."""

    mesh: MeshSpec
    cost: float
    lower_bound: float
    status: str
    step_time: float
    peak_memory: int
    peak_node: str
    memory_limit: int | None
    reserve: int
    records: tuple[NodeRecord, ...]
    parameter_layouts: Mapping[str, Layout]
    inputs: Mapping[int, Layout]
    outputs: Mapping[int, Layout | None]
    fallbacks: tuple[str, ...]
    origin: PlanOrigin
    joined_axes: JoinedAxes = ()
    moved_nbytes: int | None = None
    race: tuple[Raced, ...] = ()
    rehearsed: Rehearsed | None = None
    # A file holds its outline: no plan is another for that.
    memory: MemoryTimeline | None = field(default=None, compare=False)
    micro_batches: int = 1
    head_pieces: int = 1
    other_sizes: tuple[tuple[NodeRecord, ...], ...] = ()

    @property
    def gap(self) -> float:
        """How far the cost may be above the least there is, as a share of it; with `joined_axes`, above the least of
        plans that use those together."""
        return 0.0 if self.cost <= 0 else max(0.0, (self.cost - self.lower_bound) / self.cost)
