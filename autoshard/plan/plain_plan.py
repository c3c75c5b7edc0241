"""Plans as an argument: given or a file's path, of any kind or without stages."""

from __future__ import annotations

import os

from autoshard.plan.plan import AnyPlan, PipelinePlan, Plan
from cost_model.errors import PlanError

__all__ = ["given_plan", "plain_plan"]


def given_plan(plan: AnyPlan | str | os.PathLike[str]) -> AnyPlan:
    """`plan`, or read. Raises as `Plan.load`."""
    return plan if isinstance(plan, (Plan, PipelinePlan)) else Plan.load(plan)


def plain_plan(plan: AnyPlan | str | os.PathLike[str], what: str) -> Plan:
    """`plan`, or read. PlanError for a plan with stages, which `what` does not take."""
    found = given_plan(plan)
    if isinstance(found, PipelinePlan):
        raise PlanError(
            f"{what} takes no plan with stages, and this one has {len(found.stages)}\n"
            "  try: find_plan(..., stages=None), or that plan's `stages` one by one"
        )
    return found
