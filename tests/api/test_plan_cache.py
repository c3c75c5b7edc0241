"""A plan that was proven once is read the next time; anything else is searched again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.plan import plan_cache
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import cached_plan, plan_path
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec
from passes.rules.core.rule_registry import USER_RULES, register_rule
from tests.profiles import slow_compute


def task(width: int = 8) -> Task:
    model = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4))
    captured = canonical_capture(model, (torch.randn(6, width),), {})
    return Task(captured, slow_compute(), MeshSpec({"x": 2}), CallLayouts({}, {}), {}, None, "eager", 60.0)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Searches:
    def __init__(self, one: Task, **changed: Any) -> None:
        self.task, self.changed, self.count = one, changed, 0

    def __call__(self) -> Plan:
        self.count += 1
        return replace(search_plan(self.task), **self.changed)


def test_the_second_time_nothing_is_searched() -> None:
    one, two = Searches(task()), Searches(task())
    first, second = cached_plan(one.task, one), cached_plan(two.task, two)
    assert (one.count, two.count) == (1, 0)
    assert second == first and second.planned.layouts == first.planned.layouts
    assert second.explain("0.weight")  # which may search with other pins


def test_another_task_is_another_plan() -> None:
    one = task()
    others = [
        task(width=10),
        replace(one, memory_limit=10**9),
        replace(one, backend="inductor"),
        replace(one, mesh=MeshSpec({"x": 4})),
        replace(one, call=CallLayouts({}, {0: None})),
    ]
    assert len({plan_path(other) for other in (one, *others)}) == 6


def test_another_rule_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in which an op is replicated is not read again when it has got a rule, nor when that is mended."""
    one = task()
    monkeypatch.setattr(USER_RULES, "builders", {})
    paths = [plan_path(one)]
    for rule in ("m n -> m n", "a b -> a b", "m n -> m n; n: whole", "m n -> m n; m: whole; n: whole"):
        register_rule("aten::relu", rule)
        paths.append(plan_path(one))
    register_rule("aten::relu", "m n -> m n")
    assert len(set(paths)) == 5 and plan_path(one) == paths[1]
    monkeypatch.setattr(USER_RULES, "builders", {})
    register_rule("aten::tanh", "m n -> m n")
    assert plan_path(one) == paths[0]


@pytest.mark.parametrize(("gap", "early"), [(0.005, False), (0.5, True), (0.5, False)])
def test_what_the_time_limit_may_have_ended_is_not_kept(
    gap: float, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ended by itself is: at its gap of 1 %, or long before its time."""
    monkeypatch.setattr(plan_cache, "_EARLY", 1.0 if early else 0.0)
    cost = search_plan(task()).cost
    found = Searches(task(), status="feasible", lower_bound=(1.0 - gap) * cost)
    cached_plan(found.task, found)
    assert plan_path(found.task).exists() == (gap < 0.01 or early)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_file_is_searched_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    found = Searches(task())
    path = plan_path(found.task)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    cached_plan(found.task, found)
    assert found.count == 1 and "searching again" in caplog.text
    assert Plan.load(path).status == "optimal"
