"""`verify`: run a plan on simulated ranks in this process and compare with the unsharded model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.arguments import checked_model
from autoshard.call_ends import autocast_as
from autoshard.global_call import GlobalCall, as_call, in_order
from autoshard.plan.plan import Plan
from autoshard.plan.plan_fits import given_plan, planned_graph, runnable
from autoshard.planning import canonical_capture, captured_as_taken
from autoshard.runtime.module import original_forward
from autoshard.verification.part_errors import Divergence, Watcher
from autoshard.verification.simulated_step import (
    SimulatedSizes,
    StagePrograms,
    full_float32,
    held_values,
    rank_programs,
    step_errors,
    usual_tangents,
)
from cost_model.errors import PlanError, checked_count
from passes.capture import Captured, flatten_call
from passes.capture.decomposed_places import lies_as, relaid
from passes.capture.nested_calls import nested_calls_written_out
from passes.capture.operator_calls import GroupedAsCaptured
from passes.capture.trees import unflatten
from passes.compile.bind_device import bind_device
from passes.ir.graph_pass import duplicate_joint
from passes.ir.joint import CPU, JointGraph, node_values
from passes.ir.op_traits import draws, is_cast
from passes.ir.process_state import random_state_kept
from passes.ir.size_names import resized_shapes
from passes.micro_batches.cut_batch import cut_for_stages
from passes.plan.describe import graph_hash
from passes.simulate.lockstep import simulate
from passes.simulate.reference import (
    eager_results,
    graph_values,
    is_narrow,
    measured_rounding,
    reference_inputs,
)
from passes.states.compute_again import compute_again

__all__ = ["Divergence", "VerifyReport", "verify"]

TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2,
    torch.float8_e4m3fn: 0.2, torch.float8_e4m3fnuz: 0.2, torch.float8_e5m2: 0.4, torch.float8_e5m2fnuz: 0.4,
}  # fmt: skip
_ROUNDINGS = 16.0
"""An error within so many times of what other roundings of the unsharded graph change is none: ranks add in another
order, and more often."""


@dataclass(frozen=True)
class VerifyReport:
    """ok: every output and gradient agrees with the unsharded model within the dtype's tolerance.

    errors: relative error per output, buffer and gradient by name. max_error: the largest.
    first_divergence: the first node of the graph whose value differs, if any does.
    """

    ok: bool
    max_error: float
    errors: Mapping[str, float]
    first_divergence: Divergence | None

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "DIFFERS"
        worst = sorted(self.errors.items(), key=lambda entry: -entry[1])[:3]
        where = "" if self.ok else "\n  largest: " + ", ".join(f"{name} {error:.3g}" for name, error in worst)
        first = "" if self.first_divergence is None else f"\n  first divergence: {self.first_divergence}"
        if not (self.ok or self.first_divergence):
            first = "\n  no node is known to differ from the captured graph: the model may compute something else here"
        return (
            f"verify: {verdict}, largest relative error {self.max_error:.3g} over {len(self.errors)} results"
            f"{where}{first}"
        )


@random_state_kept()
@full_float32()
def verify(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    example_inputs: Any,
    *,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    sizes: Sequence[Mapping[str, int]] = (),
) -> VerifyReport:
    """Simulate every rank of `plan` in lockstep, forward and backward, against the unsharded model.

    example_inputs: a tuple of arguments, or (tuple, dict of keyword arguments), all global: also those
                    of which a rank passes its shard.
    autocast:       as `find_plan` was given it.
    sizes:          others of the call, such as [{"batch": 3}, {"batch": 5, "sequence": 7}], by the names that `plan.at`
                    takes: called one after the other, each runs by the program that a parallel model would take, one
                    made for all sizes where there is one. Inputs are drawn from the example's values.
    Output gradients are random (`seed`), so every gradient path counts. Dropout draws the same
    global numbers on both sides. `model` must hold values (not be on `meta`); it is not changed. All runs on the
    device where the model is, without TensorFloat-32. A model that computes something else there than on the mesh's
    devices (autocast, a device test) is compared with its own unsharded graph, as one with dropout is.

    Of a plan with stages every result is compared, and of a difference it is not said which node is the first.

    Raises PlanError if the plan belongs to another model, inputs or code; with `sizes` also if it was loaded, and as
    `plan.at`.
    """
    plan = given_plan(plan)
    checked_model(model)
    checked_count(seed, "seed")
    call = as_call(example_inputs)
    report = _verified(model, plan, call, seed, autocast)
    if not sizes or not report.ok:
        return report
    tensors, key = flatten_call(*call)
    first = _whole(call)
    capture = lambda args, kwargs, **given: _captured(model, plan, (args, kwargs), autocast, **given)
    runs = SimulatedSizes(model, lambda captured, whole: plan)
    if plan.head_pieces == 1:
        runs.runs(first, partial(capture, *call))
    errors = dict(report.errors)
    for named in sizes:
        there = plan.at(**named)
        shapes = resized_shapes(first.shapes, named)
        drawn = [_drawn(*pair, seed) for pair in zip(tensors, shapes, strict=True)]
        at_size = unflatten(key.tree, drawn)
        runs.planned = lambda captured, whole, there=there: there
        own = plan.head_pieces > 1
        programs = None if own else runs.runs(_whole(at_size), partial(capture, *at_size)).programs
        found = _verified(model, there, at_size, seed, autocast, programs)
        said = ", ".join(f"{name} {size}" for name, size in named.items())
        errors |= {f"{name} at {said}": error for name, error in found.errors.items()}
        if not found.ok:
            return replace(found, errors=errors, max_error=max(errors.values()))
    return replace(report, errors=errors, max_error=max(errors.values()))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _whole(call: Arguments) -> GlobalCall:
    return GlobalCall(*call, {}, tuple(tuple(one.shape) for one in flatten_call(*call)[0]))


def _drawn(like: torch.Tensor, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Of its values, and lying in memory as it does."""
    places = torch.randint(max(like.numel(), 1), tuple(shape), generator=torch.Generator().manual_seed(seed))
    drawn = like.detach().flatten()[places.to(like.device)]
    return relaid(drawn, lies_as(like)).requires_grad_(like.requires_grad)


def _captured(
    model: nn.Module, plan: Plan, call: Arguments, autocast: torch.dtype | None, **given: Any
) -> Captured:
    capture_as = partial(canonical_capture, device=torch.device(plan.mesh.device_type), **given)
    with autocast_as(plan.mesh, autocast):
        # Symbols have no values, which say what sides of branches the call takes.
        return capture_as(model, *call) if given else captured_as_taken(capture_as, model, *call)[0]


def _verified(
    model: nn.Module,
    plan: Plan,
    call: Arguments,
    seed: int,
    autocast: torch.dtype | None,
    programs: StagePrograms | None = None,
) -> VerifyReport:
    """programs: that run in place of the plan's own."""
    captured = _captured(model, plan, call, autocast)
    planned = planned_graph(captured, plan)
    if graph_hash(planned) != plan.origin.graph_hash:
        given, key = flatten_call(*call)
        call = unflatten(key.tree, [in_order(tensor) for tensor in given])
        captured = _captured(model, plan, call, autocast)
        planned = planned_graph(captured, plan)
    args, kwargs = call
    try:
        plan.check_graph(planned)
    except PlanError as error:
        for check in list(captured.call.branches.values())[:1]:
            error.add_note(f"  a plan goes one way, that of find_plan's example inputs, at {check.place}")
        raise
    cut = cut_for_stages(planned, plan.micro_batches) if plan.axis else planned
    joint = captured.joint
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError(
            "verify() runs the model, and its parameters are on `meta`\n  try: model.to_empty(device='cpu'), then init"
        )
    tensors, _ = flatten_call(args, kwargs)
    here = _device_of(model)
    joint = _bound(joint, here)
    values = [value.to(here) for value in reference_inputs(joint, model, tensors, seed=seed)]
    values = usual_tangents(joint, values) if plan.axis or cut.pieces > 1 else values
    results, nodes = graph_values(joint, values)
    _check_answers(captured, results)
    comparable = autocast is None and not _is_random(joint) and _same_here(captured, model, args, kwargs)
    wanted = (
        eager_results(joint, model, lambda: _tensors(captured, model, args, kwargs), values)
        if comparable
        else results
    )
    limit = _tolerance(joint)
    rounding = measured_rounding(joint, values, results, nodes, seed=seed)
    floors = [_ROUNDINGS * change / limit for change in rounding.results]
    graph = _all_bound(cut, here) if plan.axis else _as_planned(cut, plan, here)
    with runnable(plan):
        errors = step_errors(graph, plan, values, wanted, floors, programs)
    worst = max(errors.values(), default=0.0)
    narrow = any(map(is_narrow, nodes.values()))
    if (worst <= limit and not narrow) or plan.axis or programs is not None:
        return VerifyReport(worst <= limit, worst, errors, None)
    # Once more, in the order of the global graph, where every node of it can be compared: of pieces with the first.
    if cut is not captured.joint:
        results, nodes = graph_values(graph, values)
        rounding = measured_rounding(graph, values, results, nodes, seed=seed)
    least = {name: _ROUNDINGS * change / limit for name, change in rounding.nodes.items()}
    graphs = [program.local for program in rank_programs(graph, plan)[0]]
    # Of the numbers of a float8 value, and four times as many as other roundings of the graph change: where
    # more differ, they were scaled otherwise. Results hide it, as a tolerance of 8 bits is wide.
    shares = {n: 0.05 + 4.0 * rounding.nodes[n] for n, value in nodes.items() if is_narrow(value)}
    watcher = Watcher(graph, plan, nodes, least, shares)
    watcher.attach(graphs)
    named = dict(zip((node.name for node in joint.placeholders), values, strict=True))
    shards = [list(held.values()) for held in held_values(named, plan, plan.mesh)]
    with runnable(plan):
        simulate([graph.module for graph in graphs], shards, plan.mesh, observe=watcher)
    # An intermediate may cancel where the results do not: it counts as diverged at ten times the tolerance.
    first = watcher.first(limit * 10.0)
    return VerifyReport(worst <= limit and first is None, worst, errors, first)


def _check_answers(captured: Captured, results: Sequence[torch.Tensor | None]) -> None:
    """PlanError where a branch of the forward goes another way than in the graph. results: of its outputs."""
    ends = zip(captured.joint.outputs, results, strict=True)
    outputs = {end.index: value for end, value in ends if end.kind == "output"}
    for index, check in captured.call.branches.items():
        value = outputs[index]
        if value is not None and not torch.equal(value.cpu(), check.answer):
            raise PlanError(
                f"with these inputs the forward gets {value.tolist()}, and in the plan {check.answer.tolist()}\n"
                f"  at {check.place}\n"
                "  a parallel model makes a program of its own for such calls, at the first of them\n"
                "  try: example inputs that go the way of the plan"
            )


def _as_planned(joint: JointGraph, plan: Plan, here: torch.device) -> JointGraph:
    """The graph of which ranks run parts, on the device where all is compared."""
    bound = _all_bound(joint, here)
    others = tuple(compute_again(other, plan.planned.again) for other in bound.others)
    return compute_again(replace(bound, others=others), plan.planned.again)


def _all_bound(joint: JointGraph, here: torch.device) -> JointGraph:
    """With the graphs of its other pieces."""
    return replace(_bound(joint, here), others=tuple(_all_bound(other, here) for other in joint.others))


def _bound(joint: JointGraph, here: torch.device) -> JointGraph:
    joint = replace(joint, device=here)
    if here.type != CPU.type:
        joint = duplicate_joint(joint)
        bind_device(joint.module, here)
    return joint


def _tensors(
    captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The tensor outputs of the model itself, parallel or not, in the order of the graph's outputs."""
    args, kwargs = captured.call.copied(args, kwargs)  # the model may change its arguments
    # Of a reentrant checkpoint torch gives no gradients by `torch.autograd.grad`, which leaves the model as it is;
    # of flex attention it has none on a CPU.
    with original_forward(model), nested_calls_written_out(), GroupedAsCaptured():
        return captured.call.flatten_outputs(model(*args, **kwargs), args, kwargs)


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), CPU)


def _same_here(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model computes on its own device what it computes on those of the plan."""
    here = _device_of(model)
    if here.type == captured.joint.device.type:
        return True
    return graph_hash(canonical_capture(model, args, kwargs, device=here).joint) == graph_hash(captured.joint)


def _is_random(joint: JointGraph) -> bool:
    """Whether the model draws random numbers: eager torch draws others, so only the graph can be compared."""
    return any(spec.kind == "seed" for spec in joint.inputs) or any(map(draws, joint.graph.nodes))


def _tolerance(joint: JointGraph) -> float:
    """The loosest of the dtypes that are computed with: float32 results of bfloat16 products are as good as those.
    What is only stored in 8 bits is not rounded again."""
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    found = [(node, value.dtype) for node in nodes for value in node_values(node) if value is not None]
    counted = [dtype for node, dtype in found if dtype.itemsize > 1 or is_cast(node)]
    return max((TOLERANCE.get(dtype, 0.0) for dtype in counted), default=1e-4) or 1e-4
