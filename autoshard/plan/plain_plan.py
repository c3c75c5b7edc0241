"""Where only plans without stages go."""

from __future__ import annotations

import os

from autoshard.plan.pipeline_plan import PipelinePlan
from autoshard.plan.plan import Plan
from cost_model.errors import PlanError

__all__ = ["plain_plan"]


def plain_plan(plan: Plan | PipelinePlan[Plan] | str | os.PathLike[str], what: str) -> Plan:
    """`plan`, or read. PlanError for a plan with stages, which `what` does not take."""
    found = plan if isinstance(plan, (Plan, PipelinePlan)) else Plan.load(plan)
    if isinstance(found, PipelinePlan):
        raise PlanError(
            f"{what} takes no plan with stages, and this one has {len(found.stages)}\n"
            "  try: find_plan(..., stages=None), or that plan's `stages` one by one"
        )
    return found
