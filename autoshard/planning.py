"""From a model and a mesh to a plan: `find_plan`, and the steps that `autoshard` shares with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda import nccl
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.arguments import (
    OptimizerLike,
    check_autocast,
    check_call_placements,
    check_choices,
    check_device,
    check_inference,
    check_profile_kind,
    checked_micro_batches,
    checked_model,
    optimizer_name,
)
from autoshard.call_ends import CallEndsAsked, as_inference, autocast_as, capture_as_now
from autoshard.global_call import as_call, axes_of_batch, global_call
from autoshard.plan.answer import Listener, OnBetter
from autoshard.plan.division import Division, checked_schedule, checked_stages
from autoshard.plan.other_sizes import OtherSizes, checked_sizes
from autoshard.plan.plan import Plan
from autoshard.plan.plan_ends import Constraints, resolve_pins
from autoshard.plan.task import Task
from autoshard.profiling.startup import nominal_profile, startup_profile
from autoshard.refine.refine import may_refine, shared_refined_plan
from autoshard.runtime.call_program import MOST_TRIED, Checks, Otherwise
from cost_model.deadline import Deadline
from cost_model.errors import ShardingError, checked_seconds, checked_share, type_of
from cost_model.measure.measure import check_device_type
from cost_model.measure.sampling import check_world
from cost_model.memory import parse_bytes
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.canonicalize import canonicalize
from passes.canonicalize.mark_rows import experts_of
from passes.capture import Captured, capture, flatten_call
from passes.capture.model_state import named_parameters
from passes.capture.questions import NO_ANSWERS, Answers
from passes.compile.compile_graph import check_backend
from passes.ir.process_state import collector_paused, random_state_kept
from passes.ir.routing import BALANCED, Routing, check_experts, checked_routing
from passes.ir.torch_compat import has_value
from passes.ir.torch_sizes import SymbolicShapes, symbolic_sizes
from passes.simulate.reference import call_outputs

ProfileLike = Profile | str | os.PathLike[str] | None


def mesh_spec(mesh: DeviceMesh | MeshSpec) -> MeshSpec:
    """Names and sizes of a mesh; unnamed DeviceMesh axes are called "axis0", "axis1", ..."""
    if not isinstance(mesh, (MeshSpec, DeviceMesh)):
        raise ShardingError(
            f"mesh is {type_of(mesh)}\n"
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


@random_state_kept()
@collector_paused()
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
    recompute: str = "auto",
    micro_batches: int | str = 1,
    optimizer: OptimizerLike = "adamw",
    time_limit: float = 600.0,
    autocast: torch.dtype | None = None,
    refine: str = "off",
    stages: str | None = None,
    schedule: str | None = None,
    gap: float = 0.01,
    batch: str = "global",
    on_better: OnBetter | None = None,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    inference: bool = False,
    routing: float | Sequence[float] | None = None,
) -> Plan:
    """The fastest plan for training `model` on `mesh`, with proof; nothing is run or changed.

    model:          any nn.Module, `meta` included.
    mesh:           a DeviceMesh, or a MeshSpec: then no process group and no device is needed.
    example_inputs: a tuple of the call's arguments, or (tuple, dict). Tensors with `in_placements`
                    are one rank's shards, all ranks' alike.
    profile:        a Profile, a path, or a shipped name; None: for a MeshSpec the nominal one of the device
                    type, for a DeviceMesh as in `autoshard` (then every rank must call this).
    memory_limit:   bytes per device, or "70GB" / "64GiB"; on GPUs with CUDA's context and communicators in it.
                    Head and loss run in pieces over tokens where it does not fit otherwise (`Plan.head_pieces`).
    in_placements:  pytree of placements per tensor input; None: replicated (global).
    out_placements: the same for outputs; "keep": as the plan leaves them; None: replicated (global).
    constraints:    {parameter name or pattern: placements} pins.
    backend:        what will compile the plan: "eager" runs op by op and is priced so; others fuse.
    recompute:      "auto": what `memory_limit` leaves no room for is computed again in the backward, at the least cost;
                    "user": what runs under `torch.utils.checkpoint`, and nothing else.
    micro_batches:  pieces in which a batch is run, forward and backward of each, one after the other: less is alive at
                    once. "auto": the fastest of 1, 2, 4 ... that fits `memory_limit`. Losses, gradients and dropout are
                    those of the whole batch.
    optimizer:      whose states count as memory, and whose update as time: "adamw", "adam", "momentum", "sgd", each
                    also with ", fp32 master", a float32 copy of parameters with states in float32, the first two with
                    ", amsgrad"; or an optimizer of torch's, which is not used otherwise.
    time_limit:     seconds for all of it; when it ends first, the best plan so far with its gap. Where there is none,
                    20 s more for a first plan; then InfeasibleError. On meshes of many axes, or where time is short,
                    some axes are used together (`Plan.joined_axes`).
    autocast:       plan for calls under `torch.autocast(mesh.device_type, autocast)`, also where this machine has
                    no such device and torch would ignore that. None: autocast as it is now.
    refine:         "auto": as in `autoshard`, for a DeviceMesh, on every rank of which this is then called; a MeshSpec
                    has no processes to time anything. "off": modelled prices alone; the plan says that it is unrefined.

    stages:         a mesh axis whose ranks hold stages of the model, a part of its layers each (docs/pipeline.md); the
                    plan is then a `PipelinePlan`. "auto": the fastest plan that fits, without stages or along any axis.
                    With stages, micro_batches="auto" is the fastest of 1, 2, 4 ... times their number.
    schedule:       "gpipe", "1f1b", "interleaved" or "zero_bubble": the only one that may run the stages; None: the
                    fastest that fits.
    gap:            share of the step by which the plan may be above the bound when the search ends by itself; 0: it
                    goes on as long as there is something to try.
    batch:          "per_rank": `example_inputs` are one rank's part of the batch, all ranks' alike, as in `autoshard`.
    inference:      plan the call in `eval()` and without gradients, for its latency: a prefill, or a token with the
                    cache that `example_inputs` hold. No gradients and no optimizer's states count, and a cache is laid
                    out as the call's ops are: by heads, sequence or batch (docs/generation.md).
    routing:        how uneven the loads of experts are: rows of the fullest rank over those of equally loaded experts,
                    1.5, or rows by expert, in any unit. Time and memory are those of that rank. None: equally loaded.
    sizes:          least and largest, by name, {"sequence": (1, 8192)}: the plan fits `memory_limit` at the largest of
                    each as well, together ("batch", "sequence", "height", "width", as `Plan.at` takes them).
    on_better:      called with an `Answer`, the best plan so far and its bound, as soon as there is a better one or
                    more is proven of it; the search ends, with that plan, where it returns False.

    Raises ShardingError for arguments that do not fit the model or mesh, CaptureError if the model
    cannot be traced, ProfileError, and InfeasibleError if no plan meets the pins and the limit, or the batch cannot be
    cut: it says which op needs it whole.
    """
    spec = mesh_spec(mesh)
    checked_model(model)
    check_backend(backend)
    check_choices(refine=refine, recompute=recompute, batch=batch)
    pieces = checked_micro_batches(micro_batches)
    staged = checked_stages(stages, spec)
    check_inference(inference, micro_batches, stages)
    only = checked_schedule(schedule, staged)
    updated_by = optimizer_name(optimizer)
    seconds = checked_seconds(time_limit, "time_limit")
    ranges = checked_sizes(sizes)
    ends_at = checked_share(gap, "gap")
    routed = checked_routing(routing)
    listener = None if on_better is None else Listener(on_better)
    deadline = Deadline.after(seconds, listener)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    pins = resolve_pins(constraints, named_parameters(model), spec)
    args, kwargs = as_call(example_inputs)
    check_call_placements(in_placements, out_placements, spec)
    check_autocast(autocast)
    # Last, since without a profile it may measure.
    loaded = load_profile(profile, mesh)
    given = global_call(args, kwargs, spec, in_placements, batch_axes=axes_of_batch(batch, spec, staged))
    capture_here = partial(canonical_capture, device=torch.device(spec.device_type), routing=routed)
    as_called = as_inference(model) if inference else nullcontext()
    with as_called, autocast_as(spec, autocast):
        captured, capture_here = captured_as_taken(capture_here, model, given.args, given.kwargs)
    check_experts(routed, experts_of(captured.joint.graph))
    ends = CallEndsAsked(spec, out_placements, inference, given.dtensors)
    call = ends(captured, given.layouts)
    again = capture_as_now(capture_here, spec, autocast, inference)
    task = Task(
        captured,
        loaded,
        spec,
        call,
        pins,
        limit,
        backend,
        seconds,
        recompute=recompute,
        optimizer=updated_by,
        gap=ends_at,
        sizes=OtherSizes.of(model, spec, given, captured, again, ends, ranges),
    )
    division = Division(pieces, staged, only)
    if refine == "auto" and isinstance(mesh, DeviceMesh) and may_refine(mesh, loaded.nominal):
        return shared_refined_plan(mesh, task, division)
    plan = division.fastest(task, deadline)
    if listener is not None:
        listener.returned(plan)
    return plan


@collector_paused()
def canonical_capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device | None = None,
    forward: Callable[..., Any] | None = None,
    answers: Answers = NO_ANSWERS,
    sizes: SymbolicShapes | None = None,
    routing: Routing = BALANCED,
) -> Captured:
    """The model's canonical joint graph for one call at global shapes (arguments as `capture`'s)."""
    captured = capture(model, args, kwargs, device=device, forward=forward, answers=answers, sizes=sizes)
    captured = replace(captured, joint=replace(captured.joint, routing=routing))
    with nullcontext() if sizes is None else symbolic_sizes():
        return replace(captured, joint=canonicalize(captured.joint))


def captured_as_taken(
    capture_as: Callable[..., Captured], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Captured, Callable[..., Captured]]:
    """The graph of those sides of branches that the call takes, where these are values; and what captures others so."""
    captured = capture_as(model, args, kwargs)
    tensors, here = flatten_call(args, kwargs)[0], captured.joint.device.type
    have_values = lambda: all(has_value(t, here) for t in (*tensors, *model.parameters(), *model.buffers()))
    for _ in range(MOST_TRIED):
        if not captured.call.branches or not have_values():
            break
        asked = {index for index, _ in captured.call.checks if index is not None}
        try:
            Checks(captured.call)(call_outputs(captured.joint, model, tensors, asked), later=False)
            break
        except Otherwise as other:
            capture_as = partial(capture_as, answers=other.answers)
            captured = capture_as(model, args, kwargs)
    return captured, capture_as


@contextmanager
def started_mesh(axes: Mapping[str, int] | None, device_type: str) -> Generator[DeviceMesh]:
    """A mesh over all started processes, one device each; a process group made here ends with the block.

    axes: names and sizes; None: one axis "ranks". Without torchrun this process is the only rank.
    On GPUs a process takes that of its LOCAL_RANK, unless it has joined a process group before.
    Raises ShardingError for devices that are not there, and for a mesh of more or fewer devices than processes.
    """
    joined = dist.is_initialized()
    world = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    spec = MeshSpec({"ranks": world} if axes is None else axes, device_type)
    check_device_type(device_type)
    check_world(spec, world)
    if not joined:
        _join(device_type)
    try:
        yield init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names)
    finally:
        if not joined:
            dist.destroy_process_group()


def _join(device_type: str) -> None:
    options: dict[str, Any] = {"backend": "gloo"}
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        ask_for_host_order()
        options = {"backend": "nccl", "device_id": device}
    if "RANK" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**options)


_HOST_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def in_host_order() -> bool:
    """Whether NCCL runs the kernels of several communicators of a GPU in the order in which the host issued them.

    Then they may be in flight together, since every rank issues in one order. [NCCL user guide, "Using
    multiple NCCL communicators concurrently"; since NCCL 2.26]
    """
    if os.environ.get(_HOST_ORDER, "0") in ("", "0") or not torch.cuda.is_available():
        return False
    return nccl.version()[:2] >= (2, 26)


def ask_for_host_order() -> None:
    """For scripts of our own, before the process group is made: NCCL reads its environment once."""
    os.environ.setdefault(_HOST_ORDER, "1")
