"""Who wins a race, from invented times."""

from __future__ import annotations

from autoshard.plan.plan_content import Raced
from autoshard.plan.plan_words import race_lines
from autoshard.runtime.starting import beside_each_other, by_speed, rounds_within, step_seconds

TIMES = [
    [[3.0, 1.0, 2.0], [5.0, 5.0, 5.0]],  # rank 0: of two plans three steps each
    [[9.0, 4.0, 4.0], [1.0, 1.0, 9.0]],
]


def test_a_plan_is_as_fast_as_the_median_of_its_slowest_rank() -> None:
    assert step_seconds(TIMES) == [4.0, 5.0]


def test_the_fastest_is_first_and_of_equals_the_one_that_was_found_first() -> None:
    assert by_speed([2.0, 1.0, 3.0]) == [1, 0, 2]
    assert by_speed([1.0, 1.0, 0.5]) == [2, 0, 1]


def test_the_lines_say_by_how_much() -> None:
    won = Raced("DDP", "weights whole", 0.010, 0.020)
    second = Raced("the search's", "weights split", 0.008, 0.025)
    assert race_lines([won, second]) == [
        "raced, 2 plans: DDP is kept, 20 ms a step, 25.0% faster than the search's",
        "  DDP           measured 20 ms, predicted 10 ms: weights whole",
        "  the search's  measured 25 ms, predicted 8 ms: weights split",
    ]
    assert race_lines([won])[0] == "raced, 1 plans: DDP is kept, 20 ms a step"
    assert race_lines([]) == []


def test_plans_take_turns_where_all_fit() -> None:
    assert beside_each_other([3, 4, 5], 12)
    assert not beside_each_other([3, 4, 5], 11)


def test_short_steps_run_more_often() -> None:
    assert [rounds_within(seconds) for seconds in (0.0, 0.01, 0.1, 10.0)] == [25, 25, 15, 5]
