"""How a scenario is judged: by arithmetic on made-up seconds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.racing.results import Entry, Result
from benchmarks.racing.table import details, goals, summary

CPU = (0.3, 0.2, 0.4)
OURS = Entry(
    "autoshard", "autoshard", (0.08, 0.09, 0.10), CPU, (2.0, 1.0), 40_000_000, 0.081, 0.07, "w: S(0)"
)
PINNED = Entry("pinned as DDP", "pinned", (0.2, 0.2, 0.2), CPU, (2.0, 1.0), 90_000_000, 0.2)
DDP = Entry("DDP", "hand-written", (0.1, 0.1, 0.1), CPU, (2.0, 1.0), 90_000_000)
TP = Entry("TP", "hand-written", (0.3, 0.3, 0.3), CPU, (2.0, 1.0), 40_000_000)


def result(*entries: Entry, limit: int | None = None) -> Result:
    return Result("here", "a fabric", "a model", "a reason", limit, (2.0, 1.0), entries)


def test_the_ratio_is_to_the_best_hand_written_way() -> None:
    assert result(OURS, PINNED, DDP, TP).ratio == pytest.approx(0.9)


def test_who_exceeds_the_limit_does_not_count() -> None:
    limited = result(OURS, PINNED, DDP, TP, limit=50_000_000)
    assert limited.best_hand_written == TP
    assert limited.ratio == pytest.approx(0.3)


def test_who_failed_does_not_count() -> None:
    failed = replace(DDP, seconds=(), error="RuntimeError: no")
    assert result(OURS, failed, TP).best_hand_written == TP
    assert result(OURS, failed).ratio is None
    assert result(replace(OURS, seconds=()), TP).ratio is None


def test_prediction_error_is_signed_and_relative_to_the_measured() -> None:
    assert OURS.prediction_error == pytest.approx(-0.1)
    assert TP.prediction_error is None


def test_whether_the_picked_plan_was_the_fastest_of_the_priced() -> None:
    assert result(OURS, PINNED).picked_the_best is True
    assert result(OURS, replace(PINNED, seconds=(0.05,) * 3)).picked_the_best is False


def test_within_three_hundredths_plans_are_equally_fast() -> None:
    assert result(OURS, replace(PINNED, seconds=(0.088,) * 3)).picked_the_best is True
    assert result(OURS, replace(PINNED, seconds=(0.087,) * 3)).picked_the_best is False


def test_a_tie_is_overlapping_quartiles() -> None:
    fast, slow = replace(OURS, seconds=(0.08, 0.09, 0.11)), replace(DDP, seconds=(0.10, 0.12, 0.13))
    assert result(fast, slow).tie is True
    assert result(fast, replace(slow, seconds=(0.12, 0.12, 0.13))).tie is False


def test_loss_error_is_the_largest_relative_one() -> None:
    assert result(OURS, replace(TP, losses=(2.0, 1.01))).loss_error == pytest.approx(0.01)


@pytest.mark.parametrize("loss", [2.016, float("nan")])
def test_who_trains_another_model_is_listed_and_not_ranked(loss: float) -> None:
    wrong = replace(DDP, losses=(loss, 1.0))
    race = result(OURS, wrong, TP)
    assert race.best_hand_written == TP
    assert "| DDP (another loss, off by " in details(race)
    assert goals([race]).splitlines()[-1] == "- **another loss, so not ranked: here: DDP**"
    assert result(replace(OURS, losses=(loss, 1.0)), TP).ratio is None


def test_sums_in_another_order_are_the_same_loss() -> None:
    assert result(OURS, replace(DDP, losses=(2.0, 1.00001)), TP).best_hand_written.name == "DDP"


def test_a_file_gives_back_what_was_written() -> None:
    whole = result(OURS, DDP, limit=7)
    assert Result.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_summary() -> None:
    failed = Result("there", "a fabric", "a model", "a reason", None, error="it broke")
    tuned = replace(DDP, setting="bucket_cap_mb=5", tried={"bucket_cap_mb=5": 0.1, "bucket_cap_mb=25": 0.2})
    raced = replace(OURS, name="autoshard, race=3", kind="raced", seconds=(0.08, 0.08, 0.08))
    whole = result(OURS, PINNED, tuned, TP, raced)
    assert "- DDP, settings tried: bucket_cap_mb=5 100 ms, bucket_cap_mb=25 200 ms" in details(whole)
    assert summary([whole, failed]).splitlines()[2:] == [
        "| here | DDP (bucket_cap_mb=5) | 100 ms | 90 ms | 0.90 (tie) | 0.80 | 70 ms | 81 ms | -10% | yes |",
        "| there | it broke | | | | | | | | |",
    ]


def test_goals() -> None:
    slow = replace(OURS, seconds=(0.4, 0.4, 0.4))
    assert goals([result(OURS, PINNED, DDP), result(slow, PINNED, DDP)]).splitlines() == [
        "- ratio at most 1.0: 1 of 2 scenarios, or a tie (quartiles overlap): 1; with race=3 0",
        "- ratio at most 0.8: 0 of 2 (goal: a third)",
        "- predicted within 10%: 1 of 2",
        "- predicted within 20%: 1 of 2",
        "- its own plan the fastest of those it priced, or within 3%: 1 of 2",
        "- largest relative difference of a loss from one process: 0.0e+00",
    ]


def test_details_list_the_fastest_first() -> None:
    text = details(result(TP, DDP, OURS, limit=50_000_000))
    assert "At most 50 MB a rank." in text
    names = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")][2:]
    assert names == ["| **autoshard**", "| DDP", "| TP"]
    assert "| DDP | 100 ms | 100, 100 | 300 ms |  |  |  | 90 MB (over the limit) |" in text
    assert "- autoshard: w: S(0)" in text
