"""A plan whose step was rehearsed: its prices are those of the step, in which everything takes as much longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.plan.plan import Plan
from autoshard.plan.plan_content import Rehearsed
from passes.plan.records import NodeRecord

__all__ = ["rehearsed_plan"]


def rehearsed_plan(plan: Plan, measured: float) -> Plan:
    """`plan` with `step_time` as measured, and all its other seconds as many times as long as modelled.

    One step says that the model is off, and not of what: every price counts alike (`cost_model.pace`), so the plan
    stays the best, its bound a bound, and what its own questions find is as much slower. measured: seconds of a step.
    """
    step = Rehearsed(plan.step_time if plan.rehearsed is None else plan.rehearsed.modelled, measured)
    factor = measured / plan.step_time
    return replace(
        plan,
        cost=factor * plan.cost,
        lower_bound=factor * plan.lower_bound,
        step_time=measured,
        records=_longer(plan.records, factor),
        other_sizes=tuple(_longer(records, factor) for records in plan.other_sizes),
        rehearsed=step,
        again=None if plan.again is None else plan.again.paced(step.pace),
    )


def _longer(records: Sequence[NodeRecord], factor: float) -> tuple[NodeRecord, ...]:
    return tuple(
        replace(
            record,
            seconds=factor * record.seconds,
            operands=tuple(
                replace(
                    operand,
                    transfers=tuple(replace(one, seconds=factor * one.seconds) for one in operand.transfers),
                )
                for operand in record.operands
            ),
        )
        for record in records
    )
