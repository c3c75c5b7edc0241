"""The best plan so far, from the first that is known: never slower, and the last is the one that is returned."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import Answer, InfeasibleError, MeshSpec, Plan, Profile, ShardingError, find_plan, verify
from autoshard.plan.search_with_states import StatesWithin
from cost_model.deadline import OutOfTime
from tests.profiles import slow_compute

MESH = MeshSpec({"dp": 2, "tp": 2})


def layers(width: int = 32) -> nn.Module:
    return nn.Sequential(*(one for _ in range(3) for one in (nn.Linear(width, width), nn.GELU())))


SLOW: list[dict[str, Any]] = [{"memory_limit": 0.97}, {"stages": "auto"}]


def heard(**options: Any) -> tuple[list[Answer], Plan]:
    """A model whose objective and timeline differ: several answers."""
    answers: list[Answer] = []
    given: dict[str, Any] = {"profile": slow_compute(1.0), "backend": "eager", "on_better": answers.append}
    return answers, find_plan(layers(), MESH, (torch.randn(64, 32),), **(given | options))


def figures(answers: list[Answer]) -> list[Any]:
    return [astuple(replace(answer, seconds=0.0, make=None)) for answer in answers]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole() -> tuple[list[Answer], Plan]:
    return heard()


DIVIDED: list[dict[str, Any]] = [
    {"memory_limit": 0.97},
    {"stages": "dp", "micro_batches": 4},
    {"micro_batches": 2},
]


@pytest.mark.parametrize(
    "options", [{}, *DIVIDED[1:], *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_answers_get_better_and_the_last_is_the_plan(
    options: dict[str, Any], whole: tuple[list[Answer], Plan]
) -> None:
    if share := options.get("memory_limit"):
        options = options | {"memory_limit": int(share * whole[1].peak_memory)}
    answers, plan = heard(**options) if options else whole
    times = [answer.step_time for answer in answers]
    assert times == sorted(times, reverse=True) and answers[-1].plan() is plan
    assert [answer.seconds for answer in answers] == sorted(answer.seconds for answer in answers)
    bounds = [answer.lower_bound for answer in answers]
    assert all(answer.lower_bound <= answer.step_time for answer in answers)
    assert bounds == sorted(bounds) or options.get("stages") == "auto"  # each division has its own
    for answer in answers:
        of = answer.plan()
        assert (of.step_time, of.lower_bound, of.gap) == (answer.step_time, answer.lower_bound, answer.gap)
        assert of.memory_limit is None or of.peak_memory + of.reserve <= of.memory_limit


def test_answers_are_the_same_each_time(whole: tuple[list[Answer], Plan]) -> None:
    again, plan = heard()
    assert figures(again) == figures(whole[0]) and len(again) > 2
    assert plan == whole[1]
    assert (
        find_plan(layers(), MESH, (torch.randn(64, 32),), profile=slow_compute(1.0), backend="eager") == plan
    )


def test_it_ends_where_it_is_told_to(whole: tuple[list[Answer], Plan]) -> None:
    answers: list[Answer] = []
    _, plan = heard(on_better=lambda answer: answers.append(answer) or False)
    assert figures(answers) == figures(whole[0])[:1] and answers[0].step_time > whole[1].step_time
    assert plan.step_time == answers[0].step_time and plan.records == answers[0].plan().records
    assert 0.0 < plan.lower_bound <= whole[1].lower_bound * (1.0 + 1e-9)


def test_what_is_raised_while_hearing_is_raised() -> None:
    def stop(_: Answer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heard(on_better=stop)
    with pytest.raises(ShardingError, match="on_better is 3"):
        heard(on_better=3)


@pytest.mark.parametrize("options", [{}, *DIVIDED[:2]])
def test_without_time_there_is_a_plan_that_is_right(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = layers().double(), torch.randn(64, 32, dtype=torch.float64)
    given: dict[str, Any] = {"profile": slow_compute(100.0), "backend": "eager"}
    if share := options.get("memory_limit"):
        best = find_plan(model, MESH, (x,), **given)
        options = options | {"memory_limit": int(share * best.peak_memory)}
    plan = find_plan(model, MESH, (x,), time_limit=1e-9, **given, **options)
    assert verify(model, plan, (x,)).max_error < 1e-12
    assert plan.memory_limit is None or plan.peak_memory <= plan.memory_limit


@pytest.mark.parametrize("mesh, searches", [({"dp": 4}, 2), ({"dp": 4, "tp": 1}, 2), ({"dp": 2, "tp": 2}, 3)])
def test_a_first_plan_is_searched_once_on_one_axis(
    mesh: dict[str, int], searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the search whose time is over: with axes used together, and each on its own."""
    late: list[object] = []

    def found(*given: object) -> None:
        late.append(given)
        raise OutOfTime

    monkeypatch.setattr(StatesWithin, "found", found)
    with pytest.raises(InfeasibleError, match="time_limit"):
        find_plan(layers(), MeshSpec(mesh), (torch.randn(64, 32),), profile="cpu", time_limit=1e-9)
    assert len(late) == searches


def test_where_every_op_takes_its_launch_latency_decides() -> None:
    """On a GPU kernels of a few bytes take their launch, however they are split."""
    h100 = Profile.named("h100")
    launches = replace(h100, device=replace(h100.device, launch_seconds=1.0))
    x = torch.randn(64, 32)
    plan = find_plan(layers(), MeshSpec({"dp": 2}, device_type="cuda"), (x,), profile=launches)
    assert plan.most_gain is not None and 0.0 <= plan.most_gain < 1e-3 and plan.latency_decides
    assert "latency decides: no plan saves more than 0.0% of a step in which every rank" in plan.explain()
    assert Plan.from_json(plan.to_json()).most_gain == plan.most_gain
    product = nn.Linear(512, 512, bias=False)
    large = find_plan(product, MESH, (torch.randn(512, 512),), profile=slow_compute(), backend="eager")
    assert (
        large.most_gain == pytest.approx(0.75, abs=0.01) and not large.latency_decides
    )  # a fourth on each rank
