"""What `benchmarks.planning --check` calls more than the best count recorded."""

from __future__ import annotations

import pytest

from benchmarks import planning_check
from benchmarks.planning_check import failures


def test_a_model_may_take_a_quarter_more() -> None:
    assert failures({"a": 2_499, "b": 1}, {"a": 2_000, "b": 10}) == []


def test_a_model_that_takes_more_is_named_with_both_figures() -> None:
    (line,) = failures({"a": 2_501, "b": 10}, {"a": 2_000, "b": 10})
    assert line == "a takes 2,501 calls to plan, more than 1.25 x 2,000 at best"


def test_a_model_without_a_figure_fails() -> None:
    assert failures({"a": 1}, {}) == ["a has no figure recorded: run --record"]


def test_calls_of_one_plan_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten calls of `len` in each of two plans, of which the second counts."""
    plans: list[object] = []

    def plan(problem: object) -> None:
        plans.append(problem)
        for _ in range(10):
            len("abc")

    monkeypatch.setattr(planning_check, "_plan", plan)
    counted = planning_check._calls(planning_check._products())
    assert len(plans) == 2
    # The plan itself, ten times `len`, one `append`, and the profiler's own end.
    assert 12 <= counted <= 14
