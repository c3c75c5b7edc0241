"""One planning task: the graph of a call and all that decides its plan; searched, or carried over from another plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autoshard.plan.pins import resolve_pins
from autoshard.plan.plan import Plan, PlanOrigin
from autoshard.plan.plan_collectives import collectives_of
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.search_with_reserve import found_within, plan_reserve
from autoshard.plan.variants import Again, Variant, variant_narrowing
from autoshard.version import __version__
from cost_model.bucketed import BucketedPrices
from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.errors import ShardingError
from cost_model.memory import ADAMW
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from cost_model.scaled_link import scaled_link
from passes.capture import Captured
from passes.ir.collector import collector_paused
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.layout.layout import Layout
from passes.plan.decide import Moved, decide_lowering
from passes.plan.describe import describe, fallback_ops, graph_hash
from passes.plan.lowering_plan import LoweringPlan
from passes.plan.records import layouts_of
from passes.predict.predict_step import Prediction, predicted_step
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.steps import Step
from passes.search.find import Found, find_assignment
from passes.search.graph_ends import Boundary, boundary_of
from passes.search.narrowing import Narrowing
from passes.search.step_kinds import EXPOSED, phase_seconds
from passes.strategies.prices import Prices
from passes.strategies.pricing import traffic_model

__all__ = ["CallLayouts", "Task", "carried_plan", "parameter_shapes", "prices_of", "search_plan"]


@dataclass(frozen=True)
class CallLayouts:
    """How a call's tensors are laid out: by position, the layout of inputs that are not global and
    of outputs that are not; None leaves an output to the search."""

    inputs: Mapping[int, Layout]
    outputs: Mapping[int, Layout | None]


def prices_of(profile: Profile, mesh: MeshSpec, backend: str = "inductor") -> Prices:
    """Collectives, kernels as `backend` makes them and the AdamW update of one device, from `profile`."""
    compute = ComputePrices(profile, mesh.device_type)
    collectives = CollectivePrices(profile, mesh)
    return Prices(
        mesh=mesh,
        compute=compute,
        redistributor=Redistributor(mesh, collectives),
        merged=Redistributor(mesh, BucketedPrices(collectives.seconds, mesh, compute)),
        optimizer_seconds=lambda nbytes: compute.update_seconds(nbytes, ADAMW.passes),
        traffic=traffic_model(backend),
        overlap_efficiency=profile.overlap_efficiency,
    )


@dataclass(frozen=True)
class Task:
    """What is to be planned, and under which prices."""

    captured: Captured
    profile: Profile
    mesh: MeshSpec
    call: CallLayouts
    pins: Mapping[str, Layout]
    memory_limit: int | None
    backend: str
    time_limit: float
    narrowing: Narrowing = field(default_factory=Narrowing)

    @property
    def joint(self) -> JointGraph:
        return self.captured.joint

    @cached_property
    def prices(self) -> Prices:
        """One object: what was computed of it for the search, the predicted step and the records need not be again."""
        return prices_of(self.profile, self.mesh, self.backend)

    @property
    def boundary(self) -> Boundary:
        pins = _by_first_name(self.pins, self.captured)
        return boundary_of(self.joint, parameters=pins, inputs=self.call.inputs, outputs=self.call.outputs)

    def again(self) -> Again:
        """What plans the same but for one thing, for a plan's own questions. Copying it copies no graph."""

        def step_seconds(plan: PlanContent, variant: Variant) -> float:
            return self.varied(variant).judged(layouts_of(plan.records)).seconds

        return Again(self.profile, lambda variant: search_plan(self.varied(variant)), step_seconds)

    def varied(self, variant: Variant) -> Task:
        """Raises as `resolve_pins` and `variant_narrowing`."""
        new = resolve_pins(variant.pins, parameter_shapes(self.captured), self.mesh)
        return replace(
            self,
            pins={**({} if variant.family else self.pins), **new},
            narrowing=self.narrowing if variant.link else variant_narrowing(variant, self.joint, self.mesh),
            profile=self.profile if variant.link is None else scaled_link(self.profile, *variant.link),
        )

    def judged(self, assignment: Assignment) -> Judged:
        """Lowered and put on the timeline."""
        lowering, moved = decide_lowering(self.joint, assignment, self.prices)
        return Judged(
            assignment, lowering, moved, predicted_step(self.joint, assignment, lowering, self.prices)
        )


@dataclass(frozen=True)
class Judged:
    """An assignment, how it is lowered, and its step on the timeline, if that was asked for."""

    assignment: Assignment
    lowering: LoweringPlan
    moved: Moved
    step: Prediction | None

    @property
    def seconds(self) -> float:
        assert self.step is not None
        return self.step.seconds


@collector_paused()
def search_plan(task: Task) -> Plan:
    """Search the canonical graph of the task under its ends and prices."""
    joint, prices, boundary = task.joint, task.prices, task.boundary

    judged: dict[int, Judged] = {}

    def judge(assignment: Assignment) -> Sequence[float]:
        found = judged[id(assignment)] = task.judged(assignment)
        return [] if found.step is None else [*found.step.phase_seconds]

    def find(reserve: int, seconds: float) -> Found:
        return find_assignment(
            joint,
            prices,
            boundary,
            memory_limit=task.memory_limit,
            reserve=reserve,
            time_limit=seconds,
            narrowing=task.narrowing,
            judge=judge,
        )

    def moved(found: Found) -> Sequence[Step]:
        chosen = judged[id(found.assignment)].moved
        return [step for way in chosen.values() for step in way.steps if step.kind is not None]

    found = found_within(find, moved, task.mesh, task.memory_limit, task.time_limit)
    return _plan_of(task, prices, found, judged[id(found.assignment)], task.again())


def carried_plan(task: Task, first: Plan) -> Plan:
    """A plan for another call of the model that `first` plans, with its layouts wherever they fit: no search.

    Where a node has no counterpart in `first`, it is searched. Nothing is proven of the result, and its step is not
    simulated: `step_time` is the objective's. Raises InfeasibleError if the layouts do not fit.
    """
    prices = task.prices
    found = find_assignment(
        task.joint,
        prices,
        task.boundary,
        memory_limit=task.memory_limit,
        reserve=0 if task.memory_limit is None else first.reserve,
        time_limit=task.time_limit,
        narrowing=Narrowing(held=first.assignment),
    )
    unproven = replace(found, lower_bound=0.0, gap=1.0, status="feasible")
    lowered = decide_lowering(task.joint, found.assignment, prices)
    return _plan_of(task, prices, unproven, Judged(found.assignment, *lowered, None), None)


def _plan_of(task: Task, prices: Prices, found: Found, judged: Judged, again: Again | None) -> Plan:
    """Its `step_time` is the objective's where it was not judged."""
    joint, mesh = task.joint, task.mesh
    records = describe(joint, found.assignment, judged.lowering, judged.moved, prices)
    totals = found.step.totals(records)
    recounted = sum(phase_seconds(totals, found.overlaps)) + float(totals[EXPOSED])
    assert math.isclose(recounted, found.seconds, rel_tol=1e-6), (recounted, found.seconds)
    return Plan(
        mesh=mesh,
        cost=found.seconds,
        lower_bound=found.lower_bound,
        status=found.status,
        step_time=found.seconds if judged.step is None else judged.step.seconds,
        peak_memory=found.peak_nbytes,
        peak_node=found.peak_node,
        memory_limit=task.memory_limit,
        reserve=plan_reserve(mesh, collectives_of(records)),
        records=records,
        parameter_layouts=_parameter_layouts(joint, found.assignment, task.captured),
        inputs=task.call.inputs,
        outputs=_output_layouts(joint, found.assignment),
        fallbacks=fallback_ops(joint),
        origin=PlanOrigin(
            profile=task.profile.name,
            profile_hash=task.profile.hash(),
            nominal=task.profile.nominal,
            graph_hash=graph_hash(joint),
            autoshard=__version__,
            torch=torch.__version__,
        ),
        again=again,
    )


def parameter_shapes(captured: Captured) -> dict[str, torch.Tensor]:
    """Every parameter name, tied ones included, to a tensor of its shape."""
    joint = captured.joint
    found: dict[str, torch.Tensor] = {}
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        if spec.kind == "param":
            for name in (spec.name, *captured.aliases.get(spec.name, ())):
                found[name] = node.meta["val"]
    return found


def _by_first_name(pins: Mapping[str, Layout], captured: Captured) -> dict[str, Layout]:
    """Pins by the name the graph knows; ShardingError if two names of one tied parameter disagree."""
    first = {alias: name for name, aliases in captured.aliases.items() for alias in aliases}
    resolved: dict[str, Layout] = {}
    for name, layout in pins.items():
        known = first.get(name, name)
        if resolved.get(known, layout) != layout:
            raise ShardingError(
                f"{name} and {known} are one tied parameter, pinned in two ways\n  try: pin it by one name"
            )
        resolved[known] = layout
    return resolved


def _parameter_layouts(joint: JointGraph, assignment: Any, captured: Captured) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    for spec, node in zip(joint.inputs, joint.placeholders, strict=True):
        if spec.kind == "param":
            for name in (spec.name, *captured.aliases.get(spec.name, ())):
                layouts[name] = assignment[node.name].results[0]
    return layouts


def _output_layouts(joint: JointGraph, assignment: Any) -> dict[int, Layout | None]:
    ends = iter(assignment["output"].operands)
    found: dict[int, Layout | None] = {}
    for spec, result in zip(joint.outputs, joint.results, strict=True):
        layout = None if result is None else next(ends)
        if spec.kind == "output":
            found[spec.index] = layout
    return found
