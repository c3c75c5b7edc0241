"""`time_limit` bounds all of planning: what takes long looks at one deadline."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import MeshSpec, find_plan
from autoshard.plan.answer import Answer, Listener
from cost_model.deadline import NEVER, Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from cost_model.memory import parse_bytes
from passes.layout.layout import Layout
from passes.redistribution.dim_splits import DimSpec
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.universe import UniverseKey, build_universe
from tests.profiles import slow_compute
from tests.redistribution.layouts import link_prices

PASSED = Deadline(-math.inf)
MESH = MeshSpec({"a": 2, "b": 2})


def test_without_time_for_any_search_there_is_a_plan_in_which_axes_are_used_together() -> None:
    options: dict[str, Any] = {"profile": slow_compute(), "backend": "eager"}
    x = torch.randn(64, 64)
    heard: list[Answer] = []
    plan = find_plan(nn.Linear(64, 64), MESH, (x,), time_limit=1e-9, on_better=heard.append, **options)
    assert heard[-1].gap == 1.0 and "optimal" not in heard[-1].words  # nothing is proven of others
    best = find_plan(nn.Linear(64, 64), MESH, (x,), **options)
    assert plan.joined_axes == (("a", "b"),) and plan.status == "feasible"
    assert best.step_time <= plan.step_time * (1.0 + 1e-9)


def test_without_time_and_a_plan_the_error_names_the_mesh_and_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: object, **__: object) -> None:
        raise OutOfTime

    monkeypatch.setattr("passes.search.find.SpaceBuilder", late)
    message = (
        r"mesh \(a=2, b=2\) was found within time_limit=1e-09 seconds(.|\n)*a larger `time_limit`.*than 2"
    )
    with pytest.raises(InfeasibleError, match=message) as caught:
        find_plan(nn.Linear(8, 8), MESH, (torch.randn(8, 8),), backend="eager", time_limit=1e-9)
    assert "judged" not in str(caught.value)


def test_a_small_model_is_planned_in_a_short_time() -> None:
    x = torch.randn(64, 64)
    plan = find_plan(nn.Linear(64, 64), MESH, (x,), profile=slow_compute(), backend="eager", time_limit=30.0)
    assert plan.gap < 0.05 and plan.joined_axes == ()


def test_layouts_and_the_ways_between_them_are_listed_until_the_deadline() -> None:
    key = UniverseKey((DimSpec(0, ()),) * 2, ())
    with pytest.raises(OutOfTime):
        build_universe(MESH, key, deadline=PASSED)
    redistributor = Redistributor(MESH, link_prices(MESH))
    whole, rows = Layout.replicated(2), Layout((("a",), ()))
    assert (
        redistributor.matrix([whole], [rows], (8, 8), 4, NEVER) == 0.0
    )  # a slice; now the universe is known
    with pytest.raises(OutOfTime):
        redistributor.matrix([rows], [whole], (8, 8), 4, PASSED)


def test_deadlines_are_shared_out() -> None:
    NEVER.check()
    assert NEVER.share(0.5) is NEVER and NEVER.left == math.inf
    with pytest.raises(OutOfTime):
        PASSED.check()
    hour = Deadline.after(3600.0)
    assert 3500.0 < hour.left <= 3600.0
    assert 1700.0 < hour.share(0.5).left <= 1800.0
    assert hour.at_least(60.0) == hour and 50.0 < PASSED.at_least(60.0).left <= 60.0
    assert hour.earlier(600.0).at == hour.at - 600.0


def test_a_watch_hears_by_all_deadlines_made_of_one_and_ends_them() -> None:
    heard: list[Answer] = []
    watch = Listener(lambda answer: heard.append(answer) or len(heard) < 2)
    whole = Deadline.after(3600.0, watch)
    part = replace(whole, of_part=True)
    for place, (deadline, seconds) in enumerate(((whole.share(0.5), 4.0), (part, 1.0), (whole, 5.0))):
        deadline.tell(Answer(seconds, 1.0, 0.5, place, lambda: pytest.fail("no plan is made")))
    assert [answer.step_time for answer in heard] == [4.0] and part.left > 3000.0
    whole.earlier(9.0).tell(Answer(4.0, 2.0, 0.5, 0, lambda: pytest.fail("no plan is made")))
    assert heard[-1].lower_bound == 2.0 and whole.left == part.share(0.5).left == -math.inf
    with pytest.raises(OutOfTime):
        whole.check()


def test_time_that_ends_after_plans_were_found_says_what_the_smallest_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of those that were found without a limit: more than the limit, and no more than the fastest of them."""

    def late(_: object) -> None:
        raise OutOfTime

    monkeypatch.setattr("autoshard.plan.correcting.Correcting.run", late)
    x = torch.randn(64, 8)
    options: dict[str, Any] = {"profile": slow_compute(), "backend": "eager"}
    whole = find_plan(nn.Linear(8, 64), MESH, (x,), **options).peak_memory
    message = r"memory_limit=.* within time_limit=30 seconds: .* smallest needs (.*B)\n"
    with pytest.raises(InfeasibleError, match=message) as error:
        find_plan(nn.Linear(8, 64), MESH, (x,), memory_limit=whole // 2, time_limit=30.0, **options)
    found = re.search(message, str(error.value))
    assert found and whole // 2 < parse_bytes(found[1]) <= 1.001 * whole
