"""A plan whose step was measured: as the search would find it where everything takes as much longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard import PipelinePlan, find_plan
from autoshard.plan.derived_plans import rehearsed_plan
from autoshard.plan.families import FAMILIES, Variant
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import keep_plan, keep_rehearsal, kept_plan, kept_rehearsal
from autoshard.plan.plan_content import Rehearsed, pace_of
from autoshard.plan.task import search_plan
from cost_model.measurements import paced
from cost_model.mesh import MeshSpec
from tests.profiles import slow_compute
from tests.refine.tasks import task


def measured(factor: float = 1.5) -> tuple[Plan, Plan]:
    plan = search_plan(task())
    rehearsed = rehearsed_plan(plan, factor * plan.step_time)
    assert isinstance(rehearsed, Plan)
    return plan, rehearsed


def test_it_is_the_plan_of_a_search_under_prices_of_that_pace() -> None:
    plan, rehearsed = measured()
    found = search_plan(replace(task(), pace=1.5))
    mine, its = rehearsed.planned, found.planned
    assert (mine.layouts, mine.steps, mine.turns) == (its.layouts, its.steps, its.turns)
    for name in ("cost", "lower_bound", "step_time"):
        assert getattr(rehearsed, name) == pytest.approx(getattr(found, name), rel=1e-6)
    seconds = [record.seconds for record in rehearsed.records]
    assert seconds == pytest.approx([record.seconds for record in found.records])
    moved = [[one.seconds for one in each.planned.collectives] for each in (rehearsed, found)]
    assert moved[0] and moved[0] == pytest.approx(moved[1])
    assert (rehearsed.status, rehearsed.gap) == (plan.status, pytest.approx(plan.gap))


def test_what_was_modelled_and_what_was_measured_is_said_and_kept() -> None:
    plan, rehearsed = measured()
    assert rehearsed.rehearsed is not None
    assert rehearsed.rehearsed == Rehearsed(plan.step_time, 1.5 * plan.step_time)
    assert pace_of(rehearsed.rehearsed) == pytest.approx(1.5)
    assert "as it took when it was rehearsed" in rehearsed.explain() and "times 1.50" in rehearsed.explain()
    assert "rehearsed" not in plan.explain() and "rehearsed" not in plan.to_json()
    assert Plan.from_json(rehearsed.to_json()) == rehearsed != plan
    twice = rehearsed_plan(rehearsed, plan.step_time)
    assert pace_of(twice.rehearsed) == pytest.approx(1.0) and twice.cost == pytest.approx(plan.cost)


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


def in_stages(pace: float) -> PipelinePlan:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    profile = paced(slow_compute(), pace)
    mesh = MeshSpec({"pp": 2, "dp": 2})
    plan = find_plan(model, mesh, (torch.ones(8, 16),), profile=profile, stages="pp", micro_batches=4)
    assert isinstance(plan, PipelinePlan)
    return plan


def test_stages_and_what_passes_between_them_take_as_much_longer() -> None:
    plan, found = in_stages(1.0), in_stages(1.5)
    rehearsed = rehearsed_plan(plan, 1.5 * plan.step_time)
    assert isinstance(rehearsed, PipelinePlan)
    for name in ("step_time", "cost", "lower_bound"):
        assert getattr(rehearsed, name) == pytest.approx(1.5 * getattr(plan, name))
        assert getattr(rehearsed, name) == pytest.approx(getattr(found, name), rel=0.01)  # as searches agree
    assert rehearsed.bubble == pytest.approx(plan.bubble)
    one, other = rehearsed.stages[1], found.stages[1]
    assert one.planned.layouts == other.planned.layouts
    assert [r.seconds for r in one.records] == pytest.approx([r.seconds for r in other.records])
    assert rehearsed.scheduled.prices.sent == pytest.approx(found.scheduled.prices.sent)
    assert rehearsed.peak_memory == plan.peak_memory
    assert "as it took when it was rehearsed" in rehearsed.explain()
    assert "rehearsed" not in plan.explain() and "rehearsed" not in plan.to_json()
    assert Plan.from_json(rehearsed.to_json()).rehearsed == rehearsed.rehearsed


@pytest.mark.parametrize("factor", [0.8, 1.5])
@pytest.mark.parametrize("busy", [0.3, 0.6, 0.9])
def test_stages_compute_and_wait_as_was_measured(factor: float, busy: float) -> None:
    plan = in_stages(1.0)
    rehearsed = rehearsed_plan(plan, factor * plan.step_time, busy)
    assert isinstance(rehearsed, PipelinePlan)
    assert rehearsed.step_time == pytest.approx(factor * plan.step_time)
    computed = factor * busy / (1.0 - plan.bubble)
    # Ranks that wait for each other's computing wait even if nothing takes time to pass.
    waits_at_least = computed * plan.step_time > factor * plan.step_time
    assert rehearsed.bubble == pytest.approx(plan.bubble if waits_at_least else 1.0 - busy, abs=1e-6), (
        computed
    )
    assert Plan.from_json(rehearsed.to_json()) == rehearsed
    assert f"and ranks were seen to compute {busy:.1%} of it" in rehearsed.explain()
    if not waits_at_least:
        assert rehearsed.stages[0].step_time == pytest.approx(computed * plan.stages[0].step_time)


@pytest.mark.parametrize(
    "text", ["", "[]", "0.25", "[-1.0, null]", "[NaN, null]", "[1e9, null]", "[0.25, 2.0]"]
)
def test_a_damaged_file_is_no_rehearsal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step.json"
    assert kept_rehearsal(path) is None
    path.write_text(text)
    assert kept_rehearsal(path) is None
    for busy in (None, 0.5):
        keep_rehearsal(path, 0.25, busy)
        assert kept_rehearsal(path) == (0.25, busy)
