"""Ranks' figures put together, and the page they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from autoshard.reporting.measured import PeakMemory, RankFigures, put_together
from autoshard.reporting.recorder import StepTimes
from autoshard.reporting.report_steps import report_text
from passes.predict.prediction import PredictedCollective, PredictedPhase, Prediction

MS = 1e-3


def predicted(phase: str, node: str, kind: str, millis: float, exposed: float) -> PredictedCollective:
    return PredictedCollective(
        phase, node, "layer", kind, ("tp",), 2**20, millis * MS, 0.0, exposed * MS, millis * MS
    )


PREDICTION = Prediction(
    seconds=30 * MS,
    phases=(
        PredictedPhase("forward", 10 * MS, 8 * MS, 2 * MS, 2 * MS),
        PredictedPhase("backward", 15 * MS, 13 * MS, 4 * MS, 2 * MS),
        PredictedPhase("optimizer", 5 * MS, 5 * MS, 0.0, 0.0),
    ),
    collectives=(
        predicted("forward", "r", "all_reduce", 2, 2),
        predicted("backward", "g1", "all_gather", 2, 0),
        predicted("backward", "g2", "all_gather", 2, 2),
    ),
)


def step(seconds: float, phases: Mapping[str, float]) -> StepTimes:
    return StepTimes(seconds * MS, {name: value * MS for name, value in phases.items()})


def rank(shift: float, count: int = 4) -> RankFigures:
    """Warm-up of 100 ms, then steps of 40, 41, 42 ms; `shift` ms of the forward belong to the backward."""
    phases = {"forward": 10 + shift, "backward": 20 - shift, "optimizer": 6}
    steps = [step(100, phases), *(step(40 + i, phases) for i in range(count - 1))]
    return RankFigures(
        PREDICTION, tuple(steps), (4 * MS, 1 * MS, (3 + shift) * MS), {"forward": 8 * MS, "backward": 12 * MS}
    )


def test_the_page_of_an_eager_program() -> None:
    figures = put_together([rank(0), rank(2)], 1, fused=False)
    assert_expected_inline(
        report_text(figures, "mine (measured 2026-11-21)"),
        """\
3 steps after 1 of warm-up, 2 ranks; prices of mine (measured 2026-11-21)

                                                predicted   measured   ratio
step                                                30 ms      41 ms    0.73
  forward                                           10 ms      11 ms    0.91
    compute                                          8 ms       8 ms    1.00
    communication, alone                             2 ms       4 ms    0.50
  backward                                          15 ms      19 ms    0.79
    compute                                         13 ms      12 ms    1.08
    communication, alone                             4 ms       6 ms    0.67
  optimizer                                          5 ms       6 ms    0.83
  other                                                 -       5 ms       -

collectives, each alone                         predicted   measured   ratio
  backward all_gather[tp] 1.049MB x2                 2 ms       3 ms    0.67
  forward all_reduce[tp] 1.049MB x1                  2 ms       4 ms    0.50
""",
    )


def test_the_peak_is_of_the_rank_that_held_most() -> None:
    """Here the second, though less was predicted of it."""
    known = [(3 * 10**9, 5 * 10**9 // 2), (2 * 10**9, 4 * 10**9)]
    ranks = [
        replace(
            rank(0),
            memory=(
                PeakMemory("forward", predicted // 2, 10**9),
                PeakMemory("backward", predicted, measured),
                PeakMemory("optimizer", None, 10**6),
            ),
        )
        for predicted, measured in known
    ]
    figures = put_together(ranks, 1, fused=False)
    assert figures.peak_memory == PeakMemory("step", 2 * 10**9, 4 * 10**9)
    lines = report_text(figures, "p").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("peak memory"))
    assert_expected_inline(
        "\n".join(lines[first : first + 4]),
        """\
peak memory                                           2GB        4GB    0.50
  forward                                             1GB        1GB    1.00
  backward                                            2GB        4GB    0.50
  optimizer                                             -        1MB       -""",
    )


def test_what_was_predicted_of_a_refined_plan_is_said_besides() -> None:
    figures = put_together([rank(0)], 1, fused=False)
    page = report_text(figures, "p", refined=20.5 * MS).splitlines()
    rows = [" ".join(line.split()) for line in page[3:5]]
    assert rows == ["step 30 ms 41 ms 0.73", "refined, as planned 20.5 ms 41 ms 0.50"]
    assert "refined" not in report_text(figures, "p")


def test_nothing_is_said_of_memory_that_was_not_measured() -> None:
    figures = put_together([rank(0)], 1, fused=False)
    assert figures.peak_memory is None and "memory" not in report_text(figures, "p")


def test_a_collective_takes_as_long_as_its_slowest_rank() -> None:
    figures = put_together([rank(0), rank(2)], 1, fused=False)
    assert [c.seconds for c in figures.collectives] == pytest.approx([4 * MS, 1 * MS, 5 * MS])
    assert figures.ratio == pytest.approx(30 / 41)


def test_compiled_kernels_take_what_communication_leaves() -> None:
    """Of the backward's 19 ms the gather that hides takes nothing, the exposed one its 5 ms."""
    figures = put_together([rank(0), rank(2)], 1, fused=True)
    compute = {p.name: p.compute for p in figures.phases}
    assert compute["forward"] == pytest.approx((11 - 4) * MS)
    assert compute["backward"] == pytest.approx((19 - 5) * MS)


def test_one_step_is_counted_even_if_all_were_warm_up() -> None:
    figures = put_together([rank(0, count=2), rank(0, count=3)], 5, fused=False)
    assert (figures.steps, figures.warmup) == (1, 1)
    assert figures.seconds == pytest.approx(40 * MS)


def test_the_slowest_prediction_stands_for_all() -> None:
    slower = replace(rank(0), prediction=replace(PREDICTION, seconds=1.0))
    assert put_together([rank(0), slower], 1, fused=False).predicted == 1.0


def test_a_rank_without_one_of_the_collectives() -> None:
    """On an empty shard: the others' time counts."""
    fewer = replace(
        rank(0), prediction=replace(PREDICTION, seconds=1 * MS, collectives=PREDICTION.collectives[:1]),
        collectives=(9 * MS,),
    )  # fmt: skip
    figures = put_together([fewer, rank(0)], 1, fused=False)
    assert [c.seconds for c in figures.collectives] == pytest.approx([9 * MS, 1 * MS, 3 * MS])


def test_no_collectives() -> None:
    alone = replace(rank(0), prediction=replace(PREDICTION, collectives=()), collectives=())
    text = report_text(put_together([alone], 1, fused=False), "p")
    assert "collectives: none" in text and "communication" not in text
