"""Is it a plan, and does it fit where it is to run: its graph, its mesh, its outputs, the ops that read its layouts?"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import Plan
from cost_model.errors import AutoshardError, InfeasibleError, PlanError, ShardingError, error_line
from cost_model.memory import OPTIMIZERS, enough_bytes, format_bytes
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_view
from passes.layout.layout import Layout
from passes.states.compute_again import copied_ops
from passes.states.offers import users_choice


def axes_in(plan: Plan) -> list[tuple[str, ...]]:
    """The groups that the plan's collectives need, axes in mesh order; the same list on every rank."""
    return sorted({tuple(sorted(axes, key=plan.mesh.index)) for axes in plan.collective_axes})


def check_outputs(plan: Plan, asked: Mapping[int, Layout | None]) -> None:
    """PlanError unless the plan returns what this call promises: whole tensors, or the layouts asked for."""
    for index, layout in plan.outputs.items():
        wanted = asked.get(index, Layout.replicated(len(layout.dims))) if layout is not None else None
        if wanted is not None and wanted != layout:
            raise PlanError(
                f"the plan returns output {index} as {layout}, and out_placements asks for {wanted}\n"
                "  try: the out_placements that find_plan was given"
            )


def check_mesh(plan: Plan, spec: MeshSpec) -> None:
    """PlanError unless the plan is for a mesh of these axes."""
    if (plan.mesh.names, plan.mesh.sizes) != (spec.names, spec.sizes):
        raise PlanError(
            f"the plan was made for {plan.mesh}, and this is {spec}\n  try: find_plan(...) for this mesh"
        )


def check_limit(plan: Plan, memory_limit: int | None, at: str = "") -> None:
    """InfeasibleError unless the plan holds so many bytes per device at most. at: of which sizes of its call."""
    needed = plan.peak_memory + plan.reserve
    if memory_limit is not None and needed > memory_limit:
        where, more = (f" {at}", ", sizes=...") if at else ("", "")
        raise InfeasibleError(
            f"plan needs {enough_bytes(needed)} per device{where}, and memory_limit is {format_bytes(memory_limit)}\n"
            f"  try: memory_limit={enough_bytes(needed)}, or a plan of find_plan(..., memory_limit=...{more})"
        )


def check_optimizer(plan: Plan, optimizer: str | None) -> None:
    """ShardingError where the plan is known to count an optimizer that keeps more or less than the one that was
    named."""
    counted = plan.origin.optimizer
    if optimizer is not None and counted in OPTIMIZERS and _kept(optimizer) != _kept(counted):
        raise ShardingError(
            f"optimizer is {optimizer!r}, and plan counts the states of {counted!r}\n"
            f"  try: optimizer={counted!r} or none, or a plan of find_plan(..., optimizer={optimizer!r})"
        )


def _kept(optimizer: str) -> tuple[int, int]:
    found = OPTIMIZERS[optimizer]
    return found.states, found.element_nbytes


def check_pins(plan: Plan, pins: Mapping[str, Layout]) -> None:
    """ShardingError unless the plan has every pinned parameter as `constraints` say."""
    for stage in plan.stages:
        for name, pin in pins.items():
            layout = stage.parameter_layouts.get(name, pin)
            if layout != pin:
                raise ShardingError(
                    f"constraints pin {name} to {pin}, and plan has it as {layout}\n"
                    "  try: without constraints, or a plan of find_plan(..., constraints=...)"
                )


def check_again(plan: Plan, recompute: str, joint: JointGraph) -> None:
    """PlanError where `recompute` is "user" and the plan computes other ops again than the model's checkpoints say.

    joint: the graph that the plan names.
    """
    if recompute != "user":
        return
    asked = set(users_choice(joint))
    views = {node.name for node in joint.graph.nodes if node.op == "call_function" and is_view(node)}
    again = {name for stage in plan.stages for name in copied_ops(record.name for record in stage.records)}
    others = sorted(again - asked - views)
    if others or (asked and not again):
        what = f"computes {others[0]} again" if others else "computes nothing again"
        why = "does not run it" if others else "runs ops"
        raise PlanError(
            f'recompute is "user", and plan {what}, while the model {why} under torch.utils.checkpoint\n'
            '  try: recompute="auto", which leaves it to the plan, or a plan of find_plan(..., recompute="user")'
        )


@contextmanager
def runnable(plan: Plan) -> Generator[None]:
    """A plan that the search found runs. One that somebody edited may ask for what no op can do."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:
        raise PlanError(
            f"the plan for {plan.mesh} cannot be run: {error_line(error)}\n"
            "  its layouts contradict each other or the ops that read them\n"
            "  try: find_plan(...) again, or the plan as it was saved"
        ) from error


def given_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """`plan`, or read. Raises as `Plan.load`."""
    return plan if isinstance(plan, Plan) else Plan.load(plan)


def plain_plan(plan: Plan | str | os.PathLike[str], what: str) -> Plan:
    """`plan`, or read. PlanError for a plan with stages, which `what` does not take."""
    found = given_plan(plan)
    if found.axis:
        raise PlanError(
            f"{what} takes no plan with stages, and this one has {len(found.stages)}\n"
            "  try: find_plan(..., stages=None), or that plan's `stages` one by one"
        )
    return found


def planned_graph(captured: Captured, plan: Plan) -> JointGraph:
    """The graph that a plan of the call names: with stages the whole call's, else that of the first piece."""
    if plan.axis:
        return captured.joint
    return cut_call(captured, plan.micro_batches, plan.head_pieces).joint
