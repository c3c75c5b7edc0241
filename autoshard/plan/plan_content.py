"""What a plan holds: the data that its file, its checks and its explanations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from passes.plan.records import NodeRecord

__all__ = ["PlanContent", "PlanOrigin"]


@dataclass(frozen=True)
class PlanOrigin:
    """What a plan was found for and with.

    profile, profile_hash, nominal: the prices; nominal ones were never measured.
    graph_hash: of the canonical joint graph. autoshard, torch: versions.
    """

    profile: str
    profile_hash: str
    nominal: bool
    graph_hash: str
    autoshard: str
    torch: str


@dataclass(frozen=True)
class PlanContent:
    """A plan as data; `autoshard.Plan` says what can be done with it.

    cost:        seconds of one training step, forward, backward and optimizer update, as the search
                 counts them. lower_bound: no plan's are fewer. gap: (cost - lower_bound) / cost.
    status:      "optimal", or "feasible" if the time limit ended the proof.
    step_time:   predicted seconds of a step: the program that will run, on a timeline of its kernels
                 and collectives. peak_memory: predicted bytes on the fullest device.
    parameter_layouts: parameter name -> layout (tied names included).
    inputs, outputs: layout per tensor input and output of a call, by position.
    fallbacks:   ops without a rule, which run replicated.
    """

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

    @property
    def gap(self) -> float:
        return 0.0 if self.cost <= 0 else max(0.0, (self.cost - self.lower_bound) / self.cost)
