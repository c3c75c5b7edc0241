"""Seconds of a step, by the formulas of the papers and by hand."""

from __future__ import annotations

import random

import pytest

from passes.stages.pipeline_orders import ORDERS, StageSeconds, pipeline_order, pipeline_timeline


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_equal_stages_wait_for_the_pipeline_to_fill_and_to_drain(name: str, ranks: int, pieces: int) -> None:
    """(p - 1) (f + b) beyond m (f + b)."""
    timeline = pipeline_timeline(
        pipeline_order(name, ranks, pieces),
        [StageSeconds(1.0, 1.5, 0.5)] * ranks,
        [0.0] * ranks,
        [0.0] * ranks,
    )
    assert timeline.seconds == pytest.approx((pieces + ranks - 1) * 3.0)
    assert timeline.bubble == pytest.approx((ranks - 1) / (pieces + ranks - 1))


def test_stages_of_half_the_size_halve_the_bubble() -> None:
    """[Narayanan et al., arXiv:2104.04473: (p - 1) (f + b) / v]"""
    order = pipeline_order("interleaved", 4, 8, stages_per_rank=2)
    timeline = pipeline_timeline(order, [StageSeconds(0.5, 0.5, 0.5)] * 8, [0.0] * 7, [0.0] * 7)
    assert timeline.seconds == pytest.approx(8 * 3.0 + 3 * 3.0 / 2)


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 4), (4, 8), (4, 16)])
def test_weights_fill_the_bubble(ranks: int, pieces: int) -> None:
    """[Qi et al., arXiv:2401.10241: ZB-H1 waits (p - 1) (f + b - w)], a third of 1F1B's where all are equal."""
    seconds = [StageSeconds(1.0, 1.0, 1.0)] * ranks
    timeline = pipeline_timeline(
        pipeline_order("zero_bubble", ranks, pieces), seconds, [0.0] * ranks, [0.0] * ranks
    )
    assert timeline.seconds == pytest.approx(pieces * 3.0 + (ranks - 1) * 1.0)


def test_transfers_by_hand() -> None:
    """Two stages, two pieces, GPipe: f 1 and 2, b 2 and 4, 0.5 to send, 0.25 to return.

    stage 0: F 0-1, F 1-2. Arrive 1.5, 2.5. stage 1: F 1.5-3.5, F 3.5-5.5, B 5.5-9.5, B 9.5-13.5.
    Returned 9.75 and 13.75. stage 0: B 9.75-11.75, B 13.75-15.75.
    """
    order = pipeline_order("gpipe", 2, 2)
    timeline = pipeline_timeline(order, [StageSeconds(1, 1, 1), StageSeconds(2, 2, 2)], [0.5], [0.25])
    found = {str(event.action): (event.start, event.end) for event in timeline.events}
    assert found == {
        "0F0": (0, 1), "0F1": (1, 2), "1F0": (1.5, 3.5), "1F1": (3.5, 5.5),
        "1B0": (5.5, 9.5), "1B1": (9.5, 13.5), "0B0": (9.75, 11.75), "0B1": (13.75, 15.75),
    }  # fmt: skip
    assert timeline.seconds == 15.75 and timeline.busy == (6.0, 12.0)
    assert timeline.bubble == pytest.approx(1 - 18 / 31.5)
    sent = [(t.direction, t.piece, t.start, t.end) for t in timeline.transfers]
    assert sent == [
        ("sent", 0, 1, 1.5),
        ("sent", 1, 2, 2.5),
        ("returned", 0, 9.5, 9.75),
        ("returned", 1, 13.5, 13.75),
    ]


def test_transfers_over_one_boundary_go_one_after_another() -> None:
    order = pipeline_order("gpipe", 2, 3)
    timeline = pipeline_timeline(order, [StageSeconds(1, 1, 0), StageSeconds(1, 1, 0)], [5.0], [0.0])
    assert [(t.start, t.end) for t in timeline.transfers if t.direction == "sent"] == [
        (1, 6),
        (6, 11),
        (11, 16),
    ]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("seed", range(5))
def test_every_timeline_keeps_to_what_waits_for_what(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    ranks, local = draw.choice([2, 3, 4]), draw.choice([1, 2]) if ORDERS[name].looped else 1
    order = pipeline_order(name, ranks, ranks * draw.choice([1, 2, 3]), stages_per_rank=local)
    count = order.stages
    sent, returned = [[draw.random() for _ in range(count - 1)] for _ in range(2)]
    stages = [StageSeconds(draw.random(), draw.random(), draw.random()) for _ in range(count)]
    timeline = pipeline_timeline(order, stages, sent, returned)
    at = {str(event.action): event for event in timeline.events}
    assert len(at) == sum(map(len, order.ranks))
    for rank, row in enumerate(order.ranks):
        times = [t for action in row for t in (at[str(action)].start, at[str(action)].end)]
        assert times == sorted(times)
        assert all(at[str(action)].rank == rank for action in row)
    for event in timeline.events:
        stage, piece, kind = event.action.stage, event.action.piece, event.action.kind
        if kind == "forward" and stage:
            assert event.start >= at[f"{stage - 1}F{piece}"].end + sent[stage - 1] - 1e-12
        elif kind != "forward" and kind != "weight":
            assert event.start >= at[f"{stage}F{piece}"].end - 1e-12
            before = next(
                (at[f"{stage + 1}{x}{piece}"] for x in "BI" if f"{stage + 1}{x}{piece}" in at), None
            )
            assert before is None or event.start >= before.end + returned[stage] - 1e-12
    assert 0.0 <= timeline.bubble < 1.0
