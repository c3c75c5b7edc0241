"""From a model and a mesh to a plan: `find_plan`, and the steps that `autoshard` shares with it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.arguments import (
    check_autocast,
    check_call_placements,
    check_device,
    check_profile_kind,
    checked_model,
)
from autoshard.explain import Collective, collectives_of
from autoshard.inputs import global_call
from autoshard.outputs import output_layouts
from autoshard.pins import Constraints, resolve_pins
from autoshard.plan import Plan, PlanOrigin
from autoshard.profiling.startup import nominal_profile, startup_profile
from autoshard.reserve import found_within, plan_reserve
from autoshard.signature import as_call
from autoshard.version import __version__
from cost_model.arguments import checked_seconds
from cost_model.bucketed import BucketedPrices
from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.errors import ShardingError
from cost_model.memory import ADAMW, parse_bytes
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.canonicalize import canonicalize
from passes.capture import Captured, capture
from passes.capture.autocast import autocast_on
from passes.compile import check_backend
from passes.describe import describe, fallback_ops, graph_hash
from passes.hiding import step_parts
from passes.joint import JointGraph
from passes.layout import Layout
from passes.predict import predicted_step
from passes.pricing import traffic_model
from passes.random_state import random_state_kept
from passes.redistribute import Redistributor
from passes.search.boundary import Boundary, boundary_of
from passes.search.find import Found, find_assignment
from passes.search.space import Prices

__all__ = ["CallLayouts", "Task", "carried_plan", "find_plan", "mesh_spec", "prices_of", "search_plan"]

ProfileLike = Profile | str | os.PathLike[str] | None


@dataclass(frozen=True)
class CallLayouts:
    """How a call's tensors are laid out: by position, the layout of inputs that are not global and
    of outputs that are not; None leaves an output to the search."""

    inputs: Mapping[int, Layout]
    outputs: Mapping[int, Layout | None]


def mesh_spec(mesh: DeviceMesh | MeshSpec) -> MeshSpec:
    """Names and sizes of a mesh; unnamed DeviceMesh axes are called "axis0", "axis1", ..."""
    if not isinstance(mesh, (MeshSpec, DeviceMesh)):
        raise ShardingError(
            f"mesh is a {type(mesh).__name__}\n"
            "  try: torch.distributed.device_mesh.init_device_mesh('cuda', (8,), mesh_dim_names=('dp',))"
        )
    spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec.of(mesh)
    check_device(spec)
    return spec


def load_profile(profile: ProfileLike, mesh: DeviceMesh | MeshSpec) -> Profile:
    """`profile` itself, or read; without one what `startup_profile` gives, for a MeshSpec the nominal one."""
    check_profile_kind(profile)
    if isinstance(profile, Profile):
        return profile
    if profile is not None:
        return Profile.load(os.fspath(profile))
    return nominal_profile(mesh.device_type) if isinstance(mesh, MeshSpec) else startup_profile(mesh)


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


@random_state_kept()
def find_plan(
    model: nn.Module,
    mesh: DeviceMesh | MeshSpec,
    example_inputs: Any,
    *,
    profile: ProfileLike = None,
    memory_limit: int | str | None = None,
    in_placements: Any = None,
    out_placements: Any = None,
    constraints: Constraints | None = None,
    backend: str = "inductor",
    time_limit: float = 600.0,
    autocast: torch.dtype | None = None,
) -> Plan:
    """The fastest plan for training `model` on `mesh`, with proof; nothing is run or changed.

    model:          any nn.Module, `meta` included.
    mesh:           a DeviceMesh, or a MeshSpec: then no process group and no device is needed.
    example_inputs: a tuple of the call's arguments, or (tuple, dict). Tensors with `in_placements`
                    are one rank's shards, all ranks' alike.
    profile:        a Profile, a path, or a shipped name; None: for a MeshSpec the nominal one of the device
                    type, for a DeviceMesh as in `autoshard` (then every rank must call this).
    memory_limit:   bytes per device, or "70GB" / "64GiB"; on GPUs with CUDA's context and communicators in it.
    in_placements:  pytree of placements per tensor input; None: replicated (global).
    out_placements: the same for outputs; "keep": as the plan leaves them; None: replicated (global).
    constraints:    {parameter name or pattern: placements} pins.
    backend:        what will compile the plan: "eager" runs op by op and is priced so; others fuse.
    time_limit:     seconds for the search; when it ends first, the best plan so far with its gap.
    autocast:       plan for calls under `torch.autocast(mesh.device_type, autocast)`, also where this machine has
                    no such device and torch would ignore that. None: autocast as it is now.

    Raises ShardingError for arguments that do not fit the model or mesh, CaptureError if the model
    cannot be traced, ProfileError, and InfeasibleError if no plan meets the pins and the limit.
    """
    spec = mesh_spec(mesh)
    checked_model(model)
    check_backend(backend)
    seconds = checked_seconds(time_limit, "time_limit")
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    pins = resolve_pins(constraints, named_parameters(model), spec)
    args, kwargs = as_call(example_inputs)
    check_call_placements(in_placements, out_placements, spec)
    check_autocast(autocast)
    # Last, since without a profile it may measure.
    loaded = load_profile(profile, mesh)
    whole = global_call(args, kwargs, spec, in_placements)
    with autocast_as(spec, autocast):
        captured = canonical_capture(model, whole.args, whole.kwargs, device=torch.device(spec.device_type))
    call = CallLayouts(whole.layouts, output_layouts(captured, spec, out_placements))
    return search_plan(captured, loaded, spec, call, pins, limit, backend, seconds)


def autocast_as(mesh: MeshSpec, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Autocast of the mesh's devices to `dtype`; nothing for None. ShardingError for a dtype it does not cast to."""
    check_autocast(dtype)
    if dtype is None:
        return nullcontext()
    return autocast_on(mesh.device_type, dtype)


def canonical_capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device | None = None,
    forward: Callable[..., Any] | None = None,
) -> Captured:
    """The model's canonical joint graph for one call at global shapes (arguments as `capture`'s)."""
    captured = capture(model, args, kwargs, device=device, forward=forward)
    return replace(captured, joint=canonicalize(captured.joint))


def named_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter by every name it has: tied ones appear under all of them."""
    return dict(model.named_parameters(remove_duplicate=False))


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

    @property
    def joint(self) -> JointGraph:
        return self.captured.joint

    @property
    def prices(self) -> Prices:
        return prices_of(self.profile, self.mesh, self.backend)

    @property
    def boundary(self) -> Boundary:
        pins = _by_first_name(self.pins, self.captured)
        return boundary_of(self.joint, parameters=pins, inputs=self.call.inputs, outputs=self.call.outputs)


def search_plan(
    captured: Captured,
    profile: Profile,
    mesh: MeshSpec,
    call: CallLayouts,
    pins: Mapping[str, Layout],
    memory_limit: int | None,
    backend: str,
    time_limit: float,
) -> Plan:
    """Search the canonical graph in `captured` under the given ends and prices."""
    task = Task(captured, profile, mesh, call, pins, memory_limit, backend)
    joint, prices, boundary = task.joint, task.prices, task.boundary

    def find(reserve: int, seconds: float) -> Found:
        return find_assignment(
            joint, prices, boundary, memory_limit=memory_limit, reserve=reserve, time_limit=seconds
        )

    def moved(found: Found) -> Sequence[Collective]:
        return collectives_of(describe(joint, found.assignment, prices))

    found = found_within(find, moved, mesh, memory_limit, time_limit)

    def resolve(parameter: str, placements: Any) -> Plan:
        pinned = {**pins, **resolve_pins({parameter: placements}, parameter_shapes(captured), mesh)}
        return search_plan(captured, profile, mesh, call, pinned, memory_limit, backend, time_limit)

    return _plan_of(task, found, predicted_step(joint, found.assignment, prices).seconds, resolve)


def carried_plan(task: Task, first: Plan, time_limit: float) -> Plan:
    """A plan for another call of the model that `first` plans, with its layouts wherever they fit: no search.

    Where a node has no counterpart in `first`, it is searched. Nothing is proven of the result, and its step is not
    simulated: `step_time` is the objective's. Raises InfeasibleError if the layouts do not fit.
    """
    found = find_assignment(
        task.joint,
        task.prices,
        task.boundary,
        memory_limit=task.memory_limit,
        reserve=0 if task.memory_limit is None else first.reserve,
        time_limit=time_limit,
        held=first.assignment,
    )
    return _plan_of(task, replace(found, lower_bound=0.0, gap=1.0, status="feasible"), found.seconds, None)


def _plan_of(task: Task, found: Found, step_time: float, resolve: Callable[[str, Any], Plan] | None) -> Plan:
    joint, prices, mesh = task.joint, task.prices, task.mesh
    records = describe(joint, found.assignment, prices)
    recounted = step_parts(records).seconds(prices.overlap_efficiency)
    assert math.isclose(recounted, found.seconds, rel_tol=1e-6), (recounted, found.seconds)
    return Plan(
        mesh=mesh,
        cost=found.seconds,
        lower_bound=found.lower_bound,
        status=found.status,
        step_time=step_time,
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
        resolve=resolve,
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
