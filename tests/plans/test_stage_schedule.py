"""The schedule of given stages, by arithmetic; what ranks hold under it."""

from __future__ import annotations

import pytest

from autoshard.plan.stage_schedule import Scheduled, SchedulePrices, orders_of
from passes.predict.predict_step import StageFigures
from passes.stages.pipeline_orders import pipeline_order


def stage(
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    halves: tuple[float, float] = (1.0, 1.0),
    once: tuple[float, float, float] = (0.0, 0.0, 0.0),
    held: int = 100,
    kept: int = 10,
    peak: int = 115,
) -> StageFigures:
    return StageFigures(forward, backward, *halves, *once, held, kept, peak)


def scheduled(name: str, stages: list[StageFigures], pieces: int, ranks: int = 2) -> Scheduled:
    free = (0.0,) * (len(stages) - 1)
    order = pipeline_order(name, ranks, pieces, stages_per_rank=len(stages) // ranks)
    return Scheduled(order, SchedulePrices(tuple(stages), free, free))


def test_seconds_of_gpipe_are_the_pieces_and_the_ends() -> None:
    """(pieces + stages - 1) forwards and as many backwards."""
    assert scheduled("gpipe", [stage(), stage()], 4).seconds == pytest.approx((4 + 1) * (1.0 + 2.0))


def test_what_runs_once_a_step_is_before_and_after_the_pieces() -> None:
    """Rank 1 begins when piece 0 has come; it had time for what is once for all pieces. Its update comes after, and
    rank 0, which ends last, has another."""
    slow = scheduled("gpipe", [stage(once=(0.5, 0.25, 3.0)), stage(once=(1.0, 0.0, 1.0))], 4)
    assert slow.seconds == pytest.approx(0.5 + 5 * 3.0 + 0.25 + 3.0)
    busy = [0.5 + 4 * 3.0 + 3.25, 1.0 + 4 * 3.0 + 1.0]
    assert slow.timeline.busy == pytest.approx(tuple(busy))
    assert slow.timeline.bubble == pytest.approx(1.0 - sum(busy) / (2 * slow.seconds))


def test_halves_are_priced_only_where_they_run_as_two_programs() -> None:
    stages = [stage(halves=(1.5, 1.5)), stage(halves=(1.5, 1.5))]
    assert scheduled("1f1b", stages, 4).timeline.busy == pytest.approx((12.0, 12.0))
    assert scheduled("zero_bubble", stages, 4).timeline.busy == pytest.approx((16.0, 16.0))


@pytest.mark.parametrize(("name", "flights"), [("gpipe", (4, 4)), ("1f1b", (2, 1))])
def test_ranks_hold_what_is_in_flight(name: str, flights: tuple[int, int]) -> None:
    """Held throughout, kept by each piece in flight, and what one piece makes besides: 115 - 100 - 10."""
    found = scheduled(name, [stage(), stage()], 4)
    assert found.peaks == tuple(100 + 10 * flight + 5 for flight in flights)


def test_stages_of_one_rank_hold_theirs_together() -> None:
    """Ranks 0 and 1 have stages 0, 2 and 1, 3; the largest piece of one runs beside what all keep."""
    stages = [stage(), stage(), stage(held=30, kept=0, peak=130), stage()]
    # Rank 0 runs all forwards first, rank 1 begins with stage 3's backward when stage 1 has run both pieces.
    assert scheduled("interleaved", stages, 2).peaks == (100 + 30 + 2 * 10 + 100, 100 + 100 + 3 * 10 + 5)


def test_only_orders_that_torch_would_run() -> None:
    names = lambda pieces, local: [order.name for order in orders_of(4, pieces, local)]
    assert names(4, 1) == ["gpipe", "1f1b", "interleaved", "zero_bubble"]
    assert names(2, 1) == ["gpipe", "interleaved", "zero_bubble"]
    assert names(8, 2) == ["interleaved", "zero_bubble"]
    assert names(9, 2) == []
