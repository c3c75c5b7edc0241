"""Seconds, memory and products of a step as a configuration runs it, and as the best plan does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from autoshard.call_ends import output_layouts
from autoshard.plan.family_choices import family_narrowing, made_of_experts
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_stages import plan_stages
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planner.configuration import Configuration
from autoshard.planner.meta_models import Call, GivenModel, MetaModel
from autoshard.planning import canonical_capture, find_plan
from cost_model.errors import InfeasibleError, ShardingError
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.capture import Captured
from passes.ir.joint import JointGraph, node_value
from passes.ir.op_traits import is_cast, is_collect, is_use, is_view
from passes.ir.op_work import global_flops
from passes.layout.layout import Layout, NodeLayouts
from passes.layout.placements import placements_to_layout
from passes.search.search_terms import Choose, Narrowing
from passes.states.offers import users_choice


@dataclass(frozen=True)
class Run:
    """Of one step: seconds, bytes on the fullest device with what is reserved, products' operations of all devices;
    bound: seconds under which no plan is, 0: not known."""

    seconds: float
    nbytes: float
    flops: float
    bound: float = 0.0

    def deeper(self, other: Run, times: float) -> Run:
        """With `times` as much more as `other`, of a deeper model, has."""
        further = lambda here, there: here + times * (there - here)
        return Run(
            further(self.seconds, other.seconds),
            further(self.nbytes, other.nbytes),
            further(self.flops, other.flops),
        )


@dataclass(frozen=True)
class Machine:
    """Where it runs. seconds: for each search. optimizer: as of `find_plan`."""

    profile: Profile
    device: str
    memory_limit: str | None
    optimizer: str
    seconds: float

    def mesh(self, axes: Mapping[str, int]) -> MeshSpec:
        return MeshSpec(axes, device_type=self.device)


def model_flops(joint: JointGraph) -> float:
    """Operations of the forward's products, three times: a backward has two for each. Causal attention counts by half,
    and what is computed again not at all. [the MFU of PaLM, appendix B, but for causal attention]"""
    return 3.0 * sum(global_flops(n) for n in joint.graph.nodes if n.meta.get("phase") == "forward")


def captured_on(call: Call, machine: Machine) -> Captured:
    model, args, kwargs = call
    return canonical_capture(model, args, kwargs, device=torch.device(machine.device))


def best_run(
    call: Call, axes: Mapping[str, int], machine: Machine, pieces: Sequence[int | str], flops: float
) -> tuple[Run, Plan]:
    """By the plan that autoshard finds, in the first of these numbers of micro-batches in which there is one. flops:
    the model's (`model_flops`). Raises the last's InfeasibleError."""
    model, args, kwargs = call

    def planned(count: int | str) -> Plan:
        return find_plan(
            model,
            machine.mesh(axes),
            (args, kwargs),
            profile=machine.profile,
            memory_limit=machine.memory_limit,
            micro_batches=count,
            optimizer=machine.optimizer,
            time_limit=machine.seconds,
        )

    for count in pieces[:-1]:
        with suppress(InfeasibleError):
            return _run_of(planned(count), flops)
    return _run_of(planned(pieces[-1]), flops)


def _run_of(plan: Plan, flops: float) -> tuple[Run, Plan]:
    return Run(plan.step_time, plan.peak_memory + plan.reserve, flops, plan.lower_bound), plan


def configured_run(
    model: MetaModel | GivenModel, configuration: Configuration, batch: int, sequence: int, machine: Machine
) -> Run:
    """As it runs by the configuration. Of equal layers from two depths, as steps and their peaks are affine in it."""
    looped = configuration.stages_a_rank(model.depth) if configuration.schedule == "interleaved" else 1
    configuration = replace(configuration, virtual=looped or 0, layers_a_stage=0)
    unit = configuration.stages * (looped or 2)
    few, more = 3 * unit, 5 * unit
    at = lambda layers: priced(
        model.call(batch, sequence, configuration.recompute, layers), configuration, batch, machine
    )
    if model.depth <= more or not model.is_of_equal_layers():
        return at(None)
    one, other = at(few), at(more)
    # Two plans of different kinds tell nothing of a third.
    if other.nbytes < one.nbytes or other.seconds < one.seconds:
        return at(None)
    return one.deeper(other, (model.depth - few) / (more - few))


def priced(call: Call, configuration: Configuration, batch: int, machine: Machine) -> Run:
    """As `configured_plan` runs it."""
    plan, flops = configured_plan(call, configuration, batch, machine)
    return Run(plan.step_time, plan.peak_memory + plan.reserve, flops)


def configured_plan(
    call: Call, configuration: Configuration, batch: int, machine: Machine
) -> tuple[Plan | PipelinePlan, float]:
    """The fastest plan with its weights so, in its micro-batches, with its `torch.utils.checkpoint`, within any memory;
    and the model's operations.

    ShardingError where the batch is not divided so; InfeasibleError where the model cannot be."""
    mesh, pieces = machine.mesh(configuration.axes), configuration.pieces(batch)
    captured = captured_on(call, machine)
    flops = model_flops(captured.joint)
    if configuration.recompute != "none" and not users_choice(captured.joint):
        raise ShardingError(
            f"{configuration.framework} computes blocks again, and the model has none under torch.utils.checkpoint\n"
            "  try: --hf, or checkpoint(block, x) in the model's forward"
        )
    cut = cut_call(captured, pieces, sizes_only=True)
    if configuration.stages == 1:
        return search_plan(_task(cut, cut.joint, mesh, configuration, machine)), flops
    task = _task(captured, cut.joint, mesh, configuration, machine)
    schedule, each = configuration.schedule, configuration.virtual or None
    return plan_stages(task, "pp", pieces, schedule=schedule, stages_per_rank=each), flops


def _task(
    captured: Captured, cut: JointGraph, mesh: MeshSpec, configuration: Configuration, machine: Machine
) -> Task:
    """cut: the graph in its micro-batches, of which stages are cut later."""
    joint, family = captured.joint, configuration.family
    narrowing = Narrowing() if family is None else family_narrowing(family, cut, mesh)
    narrowing = replace(narrowing, allowed={**narrowing.allowed, **_as_frameworks_do(cut, configuration)})
    inputs = {}
    if joint.pieces == 1:
        split = dict.fromkeys(configuration.batch_axes, Shard(0)) | {"cp": Shard(1)}
        rows = [split.get(axis, Replicate()) for axis in mesh.names]
        tensors = [node for node, spec in joint.given if spec.kind == "input"]
        laid_out = lambda node: placements_to_layout(
            rows, tuple(node_value(node).shape), mesh, what="a batch"
        )
        inputs = {i: laid_out(node) for i, node in enumerate(tensors)}
    return Task(
        captured,
        machine.profile,
        mesh,
        CallLayouts(inputs, output_layouts(captured, mesh, None)),
        {},
        None,
        "inductor" if configuration.compiled else "uncompiled",
        machine.seconds,
        narrowing=narrowing,
        recompute="user",
        optimizer=machine.optimizer,
    )


def _as_frameworks_do(joint: JointGraph, configuration: Configuration) -> Mapping[str, Choose]:
    """Every rank makes gradients of its own part of the batch, to be summed over the data-parallel ranks. Of what
    micro-batches share: weights are gathered in each, and gradients reduced; or once, before and after."""
    found: dict[str, Choose] = {}
    summed = {*configuration.batch_axes, *configuration.stored_axes}
    summed |= {"cp"} if configuration.context > 1 else set()
    stored, by_expert = frozenset(configuration.stored_axes), frozenset(configuration.expert_axes)
    experts = made_of_experts(joint) if by_expert else frozenset()
    named = {spec.name for node, spec in joint.given if node in experts}
    for spec, node in joint.returned:
        if spec.kind == "grad" and node is not None:
            axes = summed - by_expert if spec.name in named else summed
            found[_made(node).name] = _most(
                lambda one, axes=axes: len(axes & {axis for axis, _ in one.partial})
            )
    for node in joint.graph.nodes if stored else ():
        if is_use(node) and node.meta.get("runs") == "before":
            axes, sign = (
                stored - by_expert if node in experts else stored,
                1 if configuration.each_piece else -1,
            )
            found[node.name] = _most(lambda one, axes=axes, sign=sign: sign * len(axes & _splits(one)))
        elif is_collect(node) and configuration.each_piece:
            found[node.name] = _most(lambda one: len(stored & _splits(one)))
    return found


def _splits(layout: Layout) -> frozenset[str]:
    """Axes that split a dim: not those over which it is a sum to come."""
    return frozenset(itertools.chain(*layout.dims))


def _made(gradient: fx.Node) -> fx.Node:
    """Where it is made, before it is cast, viewed or added to those of other pieces."""
    while is_collect(gradient) or is_view(gradient) or is_cast(gradient):
        gradient = gradient.all_input_nodes[0]
    return gradient


def _most(good: Callable[[Layout], int]) -> Choose:
    def choose(strategies: Sequence[NodeLayouts]) -> Sequence[int]:
        found = [good(strategy.results[0]) for strategy in strategies]
        return [i for i, count in enumerate(found) if count == max(found)]

    return choose
