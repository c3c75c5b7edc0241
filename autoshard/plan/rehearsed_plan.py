"""A plan whose step was rehearsed: its prices are those of the step, in which everything takes as much longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.plan.measured_schedule import measured_schedule
from autoshard.plan.plan import Plan
from autoshard.plan.plan_content import Rehearsed, pace_of
from autoshard.plan.stages_option import AnyPlan
from passes.plan.records import NodeRecord, OperandRecord

__all__ = ["rehearsed_plan"]


def rehearsed_plan(plan: AnyPlan, measured: float, busy: float | None = None) -> AnyPlan:
    """`plan` with its step as measured, and all its other seconds as many times as long as modelled.

    One step says that the model is off, and not of what: every price counts alike (`cost_model.correction`), so the
    plan stays the best, its bound a bound, and what its own questions find is as much slower. measured: seconds of a
    step. busy: of stages, as of `Rehearsed`: it tells what they compute from what they wait for (`measured_schedule`).
    """
    modelled = plan.step_time if plan.rehearsed is None else plan.rehearsed.modelled
    step = Rehearsed(modelled, measured, busy)
    factor = measured / plan.step_time
    if isinstance(plan, Plan):
        return replace(_longer(plan, factor, pace_of(step)), step_time=measured, rehearsed=step)
    prices = measured_schedule(plan.scheduled, measured, busy)
    computed = sum(one.forward for one in prices.stages) / sum(one.forward for one in plan.prices.stages)
    pace = computed * pace_of(plan.rehearsed)
    stages = tuple(_longer(stage, computed, pace) for stage in plan.stages)
    return replace(plan, stages=stages, prices=prices, rehearsed=step)


def _longer(plan: Plan, factor: float, pace: float) -> Plan:
    return replace(
        plan,
        cost=factor * plan.cost,
        lower_bound=factor * plan.lower_bound,
        step_time=factor * plan.step_time,
        records=_records(plan.records, factor),
        other_sizes=tuple(_records(records, factor) for records in plan.other_sizes),
        again=None if plan.again is None else plan.again.paced(pace),
    )


def _records(records: Sequence[NodeRecord], factor: float) -> tuple[NodeRecord, ...]:
    return tuple(
        replace(
            record,
            seconds=factor * record.seconds,
            operands=tuple(_operand(operand, factor) for operand in record.operands),
        )
        for record in records
    )


def _operand(operand: OperandRecord, factor: float) -> OperandRecord:
    transfers = tuple(replace(one, seconds=factor * one.seconds) for one in operand.transfers)
    return replace(operand, transfers=transfers)
