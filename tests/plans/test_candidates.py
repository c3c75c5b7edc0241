"""Which plans race: the search's own, the best of other families, the next best that was judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import (
    BEST,
    Candidate,
    cached_candidates,
    candidates,
    chosen_candidates,
    plan_path,
)
from autoshard.plan.plan_content import Raced
from autoshard.plan.task import CallLayouts, Task, search_plan, search_plans
from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout
from tests.models import llama
from tests.profiles import slow_compute


def task(ranks: int = 2) -> Task:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    captured = canonical_capture(model, (torch.randn(6, 8),), {})
    mesh = MeshSpec({"x": ranks})
    return Task(captured, slow_compute(), mesh, CallLayouts({}, {}), {}, None, "eager", 60.0)


PLAN = search_plan(task())


def plan(seconds: float, whole: bool = False) -> Plan:
    """Of another step, and of other layouts."""
    layouts = (
        {name: Layout.replicated(2) for name in PLAN.parameter_layouts} if whole else PLAN.parameter_layouts
    )
    return replace(PLAN, step_time=seconds, parameter_layouts=layouts)


def named(chosen: list[Candidate]) -> list[str]:
    return [one.name for one in chosen]


def test_first_of_each_kind_then_what_is_left_by_prediction() -> None:
    best = Candidate(BEST, plan(1.0))
    families = [Candidate("TP", plan(5.0)), Candidate("DDP", plan(4.0))]
    judged = [Candidate("next", plan(7.0)), Candidate("last", plan(8.0))]
    assert named(chosen_candidates(best, families, judged, 2)) == [BEST, "DDP"]
    assert named(chosen_candidates(best, families, judged, 3)) == [BEST, "DDP", "next"]
    assert named(chosen_candidates(best, families, judged, 9)) == [BEST, "DDP", "next", "TP", "last"]


def test_a_plan_races_once() -> None:
    best = Candidate(BEST, plan(1.0))
    families = [Candidate("TP", plan(1.0)), Candidate("DDP", plan(1.0, whole=True))]
    assert named(chosen_candidates(best, families, [Candidate("next", plan(1.0))], 3)) == [BEST, "DDP"]


def test_the_search_gives_plans_that_differ() -> None:
    found = candidates(task(), 3)
    assert found[0].name == BEST
    assert found[0].plan.planned.layouts == PLAN.planned.layouts
    assert len(found) == 3
    assert min(one.plan.step_time for one in found) >= (1.0 - 1e-3) * found[0].plan.step_time
    texts = {one.plan.to_text(seconds=False) for one in found}
    assert len(texts) == 3


def test_every_plan_has_the_peak_of_its_own_program() -> None:
    """The next best, too, which go to other ranks as files."""
    model, kwargs = llama()
    captured = canonical_capture(model, (), kwargs)
    plans = search_plans(replace(task(3), captured=captured), most=9)
    assert len({plan.peak_memory for plan in plans}) > 1
    for one in plans:
        assert one.memory is not None and one.peak_memory == one.memory.peak.nbytes
        assert Plan.from_json(one.to_json()) == one


def test_what_was_pinned_stays_pinned() -> None:
    split = Layout.of((16, 8), MeshSpec({"x": 2}), ((), ("x",)))
    pinned = replace(task(), pins={"0.weight": split})
    found = candidates(pinned, 3)
    assert len(found) > 1
    assert all(one.plan.parameter_layouts["0.weight"] == split for one in found)


def test_one_plan_needs_no_rival() -> None:
    assert named(candidates(task(), 1)) == [BEST]


def test_the_plans_of_a_race_are_searched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = cached_candidates(task(), 3)
    kept = plan_path(task()).with_suffix(".race3.json")
    assert kept.exists()
    monkeypatch.setattr("autoshard.plan.plan_cache.candidates", None)  # whoever searches now fails
    again = cached_candidates(task(), 3)
    assert [(one.name, one.plan) for one in again] == [(one.name, one.plan) for one in first]
    assert again[1].plan.again is not None
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.write_text("[[1]]")
    assert named(cached_candidates(task(), 3)) == named(first)
    assert "cannot be used" in caplog.text


def test_a_file_keeps_the_race() -> None:
    raced = replace(PLAN, race=(Raced("DDP", "weights whole", 0.1, 0.2), Raced(BEST, "split", 0.1, 0.3)))
    again = Plan.from_json(json.loads(json.dumps(raced.to_json())))
    assert again.race == raced.race
    assert "raced, 2 plans: DDP is kept" in again.explain()
    assert "// raced: the fastest of 2 by the clock" in again.to_text()
    assert "race" not in PLAN.to_json()
