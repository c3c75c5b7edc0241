"""What `benchmarks.planning --check` calls slower than the best figure recorded."""

from __future__ import annotations

from benchmarks.planning_check import failures


def test_a_model_may_take_twice_as_long() -> None:
    assert failures({"a": 3.9, "b": 0.1}, {"a": 2.0, "b": 1.0}) == []


def test_a_slower_model_is_named_with_both_figures() -> None:
    (line,) = failures({"a": 4.1, "b": 1.0}, {"a": 2.0, "b": 1.0})
    assert line == "a takes 4.10 of the fixed work to plan, more than 2.0 x 2.00 at best"


def test_a_model_without_a_figure_fails() -> None:
    assert failures({"a": 1.0}, {}) == ["a has no figure recorded: run --record"]
