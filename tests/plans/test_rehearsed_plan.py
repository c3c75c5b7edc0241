"""A plan whose step was measured: as the search would find it where everything takes as much longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.plan.families import FAMILIES
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import keep_plan, kept_plan
from autoshard.plan.plan_collectives import collectives_of
from autoshard.plan.rehearsed_plan import rehearsed_plan
from autoshard.plan.task import search_plan
from autoshard.plan.variants import Variant
from tests.refine.tasks import task


def measured(factor: float = 1.5) -> tuple[Plan, Plan]:
    plan = search_plan(task())
    return plan, rehearsed_plan(plan, factor * plan.step_time)


def test_it_is_the_plan_of_a_search_under_prices_of_that_pace() -> None:
    plan, rehearsed = measured()
    found = search_plan(replace(task(), pace=1.5))
    assert rehearsed.assignment == found.assignment and rehearsed.lowering == found.lowering
    for name in ("cost", "lower_bound", "step_time"):
        assert getattr(rehearsed, name) == pytest.approx(getattr(found, name), rel=1e-6)
    seconds = [record.seconds for record in rehearsed.records]
    assert seconds == pytest.approx([record.seconds for record in found.records])
    moved = [[one.seconds for one in collectives_of(each.records)] for each in (rehearsed, found)]
    assert moved[0] and moved[0] == pytest.approx(moved[1])
    assert (rehearsed.status, rehearsed.gap) == (plan.status, pytest.approx(plan.gap))


def test_what_was_modelled_and_what_was_measured_is_said_and_kept() -> None:
    plan, rehearsed = measured()
    assert rehearsed.rehearsed is not None
    assert (rehearsed.rehearsed.modelled, rehearsed.pace) == (plan.step_time, pytest.approx(1.5))
    assert "as it took when it was rehearsed" in rehearsed.explain() and "times 1.50" in rehearsed.explain()
    assert "rehearsed" not in plan.explain() and "rehearsed" not in plan.to_json()
    assert Plan.from_json(rehearsed.to_json()) == rehearsed != plan
    twice = rehearsed_plan(rehearsed, plan.step_time)
    assert twice.pace == pytest.approx(1.0) and twice.cost == pytest.approx(plan.cost)


def test_its_own_questions_are_asked_under_its_prices() -> None:
    plan, rehearsed = measured()
    assert plan.again is not None and rehearsed.again is not None
    variant = Variant(family=FAMILIES[0])
    before, after = plan.again.search(variant), rehearsed.again.search(variant)
    assert after.step_time == pytest.approx(
        1.5 * before.step_time, rel=0.02
    )  # searches agree within their gaps


def test_a_kept_plan_asks_under_its_prices_as_well(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _, rehearsed = measured()
    keep_plan(path, rehearsed)
    read = kept_plan(path, task())
    assert read == rehearsed and read.again is not None
    variant = Variant()
    assert read.again.search(variant).step_time == pytest.approx(rehearsed.step_time, rel=1e-6)


def test_a_plan_without_a_model_stays_without() -> None:
    plan, _ = measured()
    assert rehearsed_plan(replace(plan, again=None), 1.0).again is None
