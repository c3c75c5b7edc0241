"""`autoshard(model, mesh)`: the one line."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.arguments import (
    OptimizerLike,
    check_call_placements,
    check_choices,
    check_inference,
    checked_dynamic,
    checked_micro_batches,
    checked_model,
    checked_race,
    optimizer_name,
)
from autoshard.call_ends import as_inference
from autoshard.global_call import as_call
from autoshard.plan.division import checked_schedule, checked_stages
from autoshard.plan.other_sizes import checked_sizes
from autoshard.plan.plan import Plan
from autoshard.plan.plan_ends import Constraints, resolve_pins
from autoshard.plan.plan_fits import check_limit, check_optimizer, check_pins, given_plan
from autoshard.planning import ProfileLike, load_profile, mesh_spec
from autoshard.runtime.attachments import attach
from autoshard.runtime.executable import SeedStream
from autoshard.runtime.module import install
from autoshard.runtime.planner import Settings
from autoshard.runtime.session import Session
from autoshard.watching.agreement import agree, collectively
from cost_model.errors import ShardingError, checked_seconds, checked_share
from cost_model.memory import parse_bytes
from cost_model.mesh import MeshSpec
from passes.capture.model_state import named_parameters
from passes.compile.compile_graph import check_backend
from passes.ir.process_state import random_state_kept
from passes.ir.routing import checked_routing

T = TypeVar("T")


@random_state_kept()
def autoshard(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Any = None,
    *,
    profile: ProfileLike = None,
    memory_limit: int | str | None = None,
    in_placements: Any = None,
    out_placements: Any = None,
    constraints: Constraints | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    backend: str = "inductor",
    recompute: str = "auto",
    micro_batches: int | str = 1,
    optimizer: OptimizerLike | None = None,
    time_limit: float = 600.0,
    race: int | None = None,
    refine: str = "auto",
    stages: str | None = None,
    schedule: str | None = None,
    gap: float = 0.01,
    tune: str = "background",
    batch: str = "global",
    dynamic: Collection[str] | None = None,
    sizes: Mapping[str, tuple[int, int]] | None = None,
    inference: bool = False,
    routing: float | Sequence[float] | None = None,
) -> nn.Module:
    """Make `model` run in parallel on `mesh`, in place, by the fastest plan; returns the same object.

    Call it on every rank with the same arguments. Class, parameter names and state dict keys stay;
    parameters become DTensors, so torch.optim, clip_grad_norm_ and torch.distributed.checkpoint work
    as they are. `model.autoshard_plan` is the `Plan`.

    model:          any nn.Module; on `meta` it is never materialised whole.
    mesh:           a DeviceMesh over ranks 0, 1, 2, ...
    example_inputs: a tuple of a call's arguments, or (tuple, dict), as a rank will pass them. None: the
                    model is captured at its first call; an optimizer made before that keeps working.
    profile:        a Profile, a path, or a shipped name; None: the one measured on these machines with this
                    mesh shape, from $XDG_CACHE_HOME/autoshard or, the first time, measured in a few seconds.
    memory_limit:   bytes per device, or "70GB" / "64GiB"; on GPUs with CUDA's context and communicators in it.
                    Head and loss run in pieces over tokens where it does not fit otherwise (`Plan.head_pieces`).
    in_placements:  pytree of placements per tensor input, for inputs of which a rank passes its shard
                    (of any size); None: as `batch` says.
    out_placements: pytree of placements per tensor output: the rank gets its shard as a plain tensor;
                    "keep": DTensors as the plan leaves them; None: global values on every rank, but in
                    training, beside a scalar loss, outputs over 1 MiB stay DTensors.
    constraints:    {parameter name or pattern: placements} pins.
    plan:           a Plan or a saved one's path: no search. Other arguments may ask for no other plan than this.
    backend:        "inductor", "eager", or any torch.compile backend.
    recompute:      "auto": what `memory_limit` leaves no room for is computed again in the backward, at the least cost;
                    "user": what runs under `torch.utils.checkpoint`, and nothing else.
    micro_batches:  pieces in which a training call's batch is run, forward and backward of each, one after the other:
                    less is alive at once. "auto": the fastest of 1, 2, 4 ... that fits `memory_limit`. Losses,
                    gradients and dropout are those of the whole batch; with a scalar loss, the call that returns it
                    runs the backward too.
    optimizer:      whose states count as memory, as `find_plan` takes it. None: torch's optimizer that has the model's
                    parameters when the first kind of call is planned, else AdamW. With `plan`: none, or the plan's.
    time_limit:     seconds for planning a kind of call once it is captured; see `find_plan`.
    race:           a last word by the clock: so many of the best plans run for a few real steps of the first kind of
                    call, on copies of parameters and buffers, and the fastest is kept (`plan.race`). None: none. With
                    micro_batches or stages they are plans in as many pieces, and in stages by other schedules.
    refine:         "auto": kernels and collectives of the plan and of its rivals are timed on these devices, and the
                    plan is searched again under those prices. Once: times and plan are kept beside the profile. Not
                    under a nominal profile, on one device, or where a step is too short for it to matter. "off": never.

    stages:         a mesh axis whose ranks hold stages: each runs a part of the model's layers and holds their
                    parameters alone, micro-batches go from one to the next, and the plan is a `PipelinePlan`
                    (docs/pipeline.md). "auto": an axis, or none, whichever is fastest. The call that returns a scalar
                    loss runs the backward too; every rank calls the model with the same batch and gets its outputs.
    schedule:       "gpipe", "1f1b", "interleaved" or "zero_bubble": the only one that may run the stages; None: the
                    fastest that fits.
    gap:            share of the step by which a plan may be above its bound when its search ends by itself.
    batch:          "global": every rank passes the same inputs, the whole batch. "per_rank": each passes its own part,
                    as a DistributedSampler gives it, of as many rows as it has: of every tensor with as many rows as
                    the call's first. Losses and outputs are those of the parts joined in the order of ranks. Ranks tell
                    each other their sizes in every call. With stages, ranks along that axis pass the same.

    tune:           "background": steps begin with a plan that is found in about two seconds, run op by op; the search,
                    timing (2 % of the steps' time) and the compiler go on beside them, and a better program, with
                    parameters and optimizer states in its layouts, takes over between two steps (`is_tuned`).
                    "first": all before the first step. "off": the first plan, compiled, stays. With `race` or `stages`
                    it is "first".
    dynamic:        names of sizes that will change, of {"batch", "sequence", "height", "width"}: calls are captured
                    with symbols for them, which takes longer and serves all their values (docs/calls.md). Dims marked
                    by `torch._dynamo.mark_dynamic` are as if named. None: symbols from a size's second value on.
    sizes:          least and largest by name, {"sequence": (1, 8192)}, of the whole call: the plan fits `memory_limit`
                    at the largest of each as well, together; the names are those of `dynamic`.

    inference:      plan for calls in `eval()` without gradients, as `generate()` makes them: `example_inputs`, or the
                    first call, decides the parameters' layouts, and caches stay split as the plan has them
                    (docs/generation.md).
    routing:        how uneven the loads of experts are, as `find_plan` takes it: for time and memory; a rank always
                    computes all rows of its experts.

    Dropout and other random ops draw from rank 0's `torch.initial_seed()` at the time of capture:
    replicas agree, shards differ, the same seed repeats the run on any mesh.

    Raises, on all ranks, before anything changed: ShardingError (arguments), CaptureError,
    ProfileError, PlanError (a plan for something else, or ranks that would run different programs),
    InfeasibleError.
    """
    spec = _checked_mesh(mesh)

    def checked() -> Settings:
        """All but the profile, where none is given: that is measured when everything else is right."""
        checked_model(model)
        check_backend(backend)
        check_inference(inference, micro_batches, stages)
        check_choices(refine=refine, recompute=recompute, batch=batch, tune=tune)
        check_call_placements(in_placements, out_placements, spec)
        limit = None if memory_limit is None else parse_bytes(memory_limit)
        ready = None if plan is None else given_plan(plan)
        pins = resolve_pins(constraints, named_parameters(model), spec)
        named = None if optimizer is None else optimizer_name(optimizer)
        if ready is not None:
            check_limit(ready, limit)
            check_pins(ready, pins)
            check_optimizer(ready, named)
        # A plan needs no profile.
        known = profile is not None or plan is not None
        return Settings(
            memory_limit=limit,
            in_placements=in_placements,
            out_placements=out_placements,
            pins=pins,
            plan=ready,
            backend=backend,
            recompute=recompute,
            time_limit=checked_seconds(time_limit, "time_limit"),
            gap=checked_share(gap, "gap"),
            tune=tune,
            refine=refine,
            profile=load_profile(profile, spec) if known else None,
            optimizer=named,
            micro_batches=_micro_batches(micro_batches, ready),
            stages=_stages(stages, ready, spec),
            schedule=_schedule(schedule, stages, ready),
            race=checked_race(race, ready is not None),
            batch=batch,
            dynamic=checked_dynamic(dynamic),
            sizes=checked_sizes(sizes),
            inference=inference,
            routing=checked_routing(routing),
        )

    settings = collectively(mesh, checked, what="autoshard(...)")
    call = None if example_inputs is None else collectively(mesh, lambda: as_call(example_inputs))
    given = {**settings.described(), "mesh": str(spec), "example_inputs": str(call is not None)}
    agree(mesh, given, what="arguments of autoshard(...)")
    if settings.profile is None:
        settings = replace(settings, profile=load_profile(None, mesh))
    session = Session(model, mesh, spec, settings)
    before = vars(model).get("forward")
    dispatcher = install(model, session.key, session.build)
    # Before the first capture: what it sees of the model is to stay.
    detach = attach(model, mesh)
    if call is not None:
        try:
            with as_inference(model) if inference else nullcontext():
                dispatcher.prepare(*call)
        except BaseException:
            _uninstall(model, before)
            detach()
            raise
    return model


def is_tuned(model: nn.Module) -> bool:
    """Whether nothing more will change beside the steps of a parallel model: on all ranks after the same calls.

    It goes on during calls alone: `while not is_tuned(model): step()`.

    Raises ShardingError for another model."""
    session = Session.of(model)
    if session is None:
        raise ShardingError("model was not made parallel\n  try: autoshard(model, mesh) before")
    return session.plan is not None and all(tuning.ended for tuning in session.tunings)


def _as_planned(plan: Plan | None, name: str, wanted: T, own: T, default: T, said: str) -> T:
    """What was asked for; a plan's own, if there is one. ShardingError if another is asked for."""
    if plan is None or wanted in (own, default):
        return wanted if plan is None else own
    raise ShardingError(
        f"{name} is {wanted!r}, and plan {said}\n  try: {name}={own!r}, or find_plan(..., {name}={wanted!r})"
    )


def _stages(given: str | None, plan: Plan | None, mesh: MeshSpec) -> str | None:
    own = (plan.axis or None) if plan is not None else None
    said = "has none" if own is None else f"has them along {own!r}"
    return _as_planned(plan, "stages", checked_stages(given, mesh), own, None, said)


def _schedule(given: str | None, stages: str | None, plan: Plan | None) -> str | None:
    own = plan.schedule if plan is not None else ""
    wanted = checked_schedule(given, plan.axis if plan is not None and own else stages)
    return _as_planned(plan if own else None, "schedule", wanted, own or None, None, f"runs {own!r}")


def _micro_batches(given: int | str, plan: Plan | None) -> int | str:
    own = 1 if plan is None else plan.micro_batches
    return _as_planned(plan, "micro_batches", checked_micro_batches(given), own, 1, f"is of {own}")


def _uninstall(model: nn.Module, before: Any) -> None:
    """`model` with the `forward` of its own that it had before, which most have none of."""
    del vars(model)["forward"]
    if before is not None:
        model.forward = before


def _checked_mesh(mesh: DeviceMesh) -> MeshSpec:
    if isinstance(mesh, MeshSpec):
        raise ShardingError(
            "mesh is a MeshSpec, which has no processes to run on\n"
            "  try: init_device_mesh(...) here, or find_plan(model, mesh, ...) to plan only"
        )
    spec = mesh_spec(mesh)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if spec.device_count > world:
        raise ShardingError(
            f"mesh has {spec.device_count} devices {spec}, but only {world} processes run\n"
            f"  try: torchrun --nproc-per-node {spec.device_count}, or a smaller mesh"
        )
    if mesh.get_coordinate() is None:
        raise ShardingError(
            f"{spec} is without this process, rank {dist.get_rank()} of {world}\n"
            f"  try: a mesh of all {world} processes, or the call under `if dist.get_rank() < {spec.device_count}`"
        )
    return spec


def random_state(model: nn.Module) -> SeedStream:
    """What dropout and other random ops of a parallel model draw next: `state_dict()`, `load_state_dict(state)`.

    The same on every rank: each loads the same state, before the first call or after it.
    Raises ShardingError for a model that `autoshard` did not make parallel.
    """
    session = Session.of(model) if isinstance(model, nn.Module) else None
    if session is None:
        raise ShardingError(
            "model is not parallel, and its random numbers are torch's own\n"
            "  try: model = autoshard(model, mesh) before, or torch.get_rng_state()"
        )
    return session.seeds
