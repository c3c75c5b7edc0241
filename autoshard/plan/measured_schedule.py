"""Prices of stages under which a step takes as long as it was measured, and ranks compute as much of it."""

from __future__ import annotations

from msgspec.structs import replace

from autoshard.plan.stage_schedule import Scheduled, SchedulePrices

__all__ = ["measured_schedule"]

_TIMES = ("forward", "backward", "input", "weight", "before", "after", "update")
_HALVINGS = 40


def measured_schedule(planned: Scheduled, seconds: float, busy: float | None) -> SchedulePrices:
    """seconds: of a step. busy: the share of all ranks' time in which they compute; None: as it is planned.

    What ranks compute takes as many times as long as they were busy, and what passes between stages as many times as
    long as makes the step: whatever holds up a piece between two stages, waiting for a core included, is a transfer to
    the stage that waits for it.
    """
    if busy is None:
        return _longer(planned, seconds)
    whole = seconds * len(planned.order.ranks)
    computed = busy * whole / sum(planned.timeline.busy)
    passing = _passing(planned, computed, seconds)
    return _longer(_priced(planned, computed, passing), seconds)


def _longer(one: Scheduled, seconds: float) -> SchedulePrices:
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
        replace(stage, **{name: computed * getattr(stage, name) for name in _TIMES})
        for stage in prices.stages
    )
    sent, returned = (tuple(passing * seconds for seconds in one) for one in (prices.sent, prices.returned))
    return SchedulePrices(stages, sent, returned)
