"""A plan whose step was rehearsed: its prices are those of the step, in which everything takes as much longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from autoshard.plan.plan import Plan
from autoshard.plan.plan_content import Rehearsed, of_stages, pace_of
from autoshard.plan.stage_schedule import Scheduled, SchedulePrices
from passes.plan.records import NodeRecord, OperandRecord


def rehearsed_plan(plan: Plan, measured: float, busy: float | None = None) -> Plan:
    """`plan` with its step as measured, and all its other seconds as many times as long as modelled.

    One step says that the model is off, and not of what: every price counts alike (`cost_model.correction`), so the
    plan stays the best, its bound a bound, and what its own questions find is as much slower. measured: seconds of a
    step. busy: of stages, as of `Rehearsed`: it tells what they compute from what they wait for (`measured_schedule`).
    """
    modelled = plan.step_time if plan.rehearsed is None else plan.rehearsed.modelled
    step = Rehearsed(modelled, measured, busy)
    factor = measured / plan.step_time
    if not plan.axis:
        return replace(_longer(plan, factor, pace_of(step)), step_time=measured, rehearsed=step)
    prices = measured_schedule(plan.scheduled, measured, busy)
    computed = sum(one.forward for one in prices.stages) / sum(
        one.forward for one in plan.scheduled.prices.stages
    )
    pace = computed * pace_of(plan.rehearsed)
    passed = zip(prices.stages, (*prices.sent, 0.0), (*prices.returned, 0.0), strict=True)
    parts = tuple(
        structs.replace(
            part, figures=figures, sent=sent, returned=returned, plan=_longer(part.plan, computed, pace)
        )
        for part, (figures, sent, returned) in zip(plan.parts, passed, strict=True)
    )
    longer = replace(plan, parts=parts, rehearsed=step)
    return replace(longer, **of_stages(**vars(longer)))


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
        structs.replace(
            record,
            seconds=factor * record.seconds,
            operands=tuple(_operand(operand, factor) for operand in record.operands),
        )
        for record in records
    )


def _operand(operand: OperandRecord, factor: float) -> OperandRecord:
    transfers = tuple(structs.replace(one, seconds=factor * one.seconds) for one in operand.transfers)
    return structs.replace(operand, transfers=transfers)


_TIMES = ("forward", "backward", "input", "weight", "before", "after", "update")
_HALVINGS = 40


def measured_schedule(planned: Scheduled, seconds: float, busy: float | None) -> SchedulePrices:
    """seconds: of a step. busy: the share of all ranks' time in which they compute; None: as it is planned.

    What ranks compute takes as many times as long as they were busy, and what passes between stages as many times as
    long as makes the step: whatever holds up a piece between two stages, waiting for a core included, is a transfer to
    the stage that waits for it.
    """
    if busy is None:
        return _stretched(planned, seconds)
    whole = seconds * len(planned.order.ranks)
    computed = busy * whole / sum(planned.timeline.busy)
    passing = _passing(planned, computed, seconds)
    return _stretched(_priced(planned, computed, passing), seconds)


def _stretched(one: Scheduled, seconds: float) -> SchedulePrices:
    """All alike, until a step takes so many seconds."""
    factor = seconds / one.seconds
    return _times(one.prices, factor, factor)


def _passing(planned: Scheduled, computed: float, seconds: float) -> float:
    """How many times as long transfers take, if anything that they take makes a step of so many seconds."""
    low, high = 0.0, 1.0
    longest = seconds / max(min((*planned.prices.sent, *planned.prices.returned), default=0.0), 1e-9)
    while _priced(planned, computed, high).seconds < seconds:
        if high > longest:
            return 1.0
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _priced(planned, computed, middle).seconds < seconds else (low, middle)
    return high


def _priced(planned: Scheduled, computed: float, passing: float) -> Scheduled:
    return Scheduled(planned.order, _times(planned.prices, computed, passing))


def _times(prices: SchedulePrices, computed: float, passing: float) -> SchedulePrices:
    stages = tuple(
        structs.replace(stage, **{name: computed * getattr(stage, name) for name in _TIMES})
        for stage in prices.stages
    )
    sent, returned = (tuple(passing * seconds for seconds in one) for one in (prices.sent, prices.returned))
    return SchedulePrices(stages, sent, returned)
