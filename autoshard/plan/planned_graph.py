"""The graph of a call that a plan names."""

from __future__ import annotations

from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import AnyPlan, PipelinePlan
from passes.capture import Captured
from passes.ir.joint import JointGraph

__all__ = ["planned_graph"]


def planned_graph(captured: Captured, plan: AnyPlan) -> JointGraph:
    """The graph that a plan of the call names: with stages the whole call's, else that of the first piece."""
    if isinstance(plan, PipelinePlan):
        return captured.joint
    return cut_call(captured, plan.micro_batches, plan.head_pieces).joint
