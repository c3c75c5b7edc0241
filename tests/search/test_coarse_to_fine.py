"""Meshes of many axes: axes are planned together, such plans are right, and they say so."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import passes.search.coarse_to_fine as coarse_to_fine
from autoshard import MeshSpec, Plan, PlanError, find_plan, verify
from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from cost_model.deadline import NEVER, Deadline, OutOfTime
from passes.layout.layout import JoinedAxes, keeps_together
from passes.search.coarse_to_fine import SpaceSize, find_fastest
from passes.search.find import Found, Sought, find_assignment
from passes.search.search_terms import Boundary, boundary_of
from tests.models import TwoLinear, llama
from tests.profiles import slow_compute

SIX = MeshSpec(dict.fromkeys("abcdef", 2))
FIVE = MeshSpec(dict.fromkeys("abcde", 2))
FOUR = MeshSpec(dict.fromkeys("abcd", 2))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).relu()).relu().mean((2, 3)))


def linear(mesh: MeshSpec, **options: Any) -> tuple[nn.Module, Any, Plan]:
    """Uneven parts: 10 columns, 5 results."""
    call = ((torch.randn(8, 10),), {})
    model = TwoLinear()
    return model, call, find_plan(model, mesh, call, profile=slow_compute(), **options)


@functools.cache
def one_linear() -> tuple[nn.Module, Any, Plan]:
    """Planning takes as long as five other tests."""
    torch.manual_seed(0)
    call, model = ((torch.randn(8, 10),), {}), nn.Sequential(nn.Linear(10, 5), nn.ReLU())
    return model, call, find_plan(model, FIVE, call, profile=slow_compute())


def convolutions(mesh: MeshSpec) -> tuple[nn.Module, Any, Plan]:
    model, call = Convolutions(), ((torch.randn(2, 3, 20, 12),), {})
    return model, call, find_plan(model, mesh, call, profile=slow_compute())


def transformer(mesh: MeshSpec) -> tuple[nn.Module, Any, Plan]:
    model, arguments = llama(layers=1)
    return model, ((), arguments), find_plan(model, mesh, ((), arguments), profile=slow_compute())


@pytest.mark.parametrize(
    ("build", "mesh"),
    [
        (lambda _: one_linear(), FIVE),
        pytest.param(linear, FIVE, marks=pytest.mark.slow),
        pytest.param(convolutions, FOUR, marks=pytest.mark.slow),
        pytest.param(linear, SIX, marks=pytest.mark.slow),
        pytest.param(convolutions, FIVE, marks=pytest.mark.slow),
        pytest.param(convolutions, SIX, marks=pytest.mark.slow),
        pytest.param(transformer, FIVE, marks=pytest.mark.slow),
    ],
)
def test_plans_with_joined_axes_are_right(build: Callable[[MeshSpec], Any], mesh: MeshSpec) -> None:
    torch.manual_seed(0)
    model, call, plan = build(mesh)
    report = verify(model, plan, call)
    assert report.ok, str(report)
    assert plan.joined_axes
    assert plan.status == "feasible" and 0.0 < plan.lower_bound <= plan.cost
    assert plan.step_time == pytest.approx(plan.cost, rel=0.01)
    layouts = [value.layout for record in plan.records for value in (*record.operands, *record.results)]
    assert any(layout.axes for layout in layouts)
    for run in plan.joined_axes:
        for one, two in itertools.pairwise(run):
            assert all(keeps_together(layout, one, two) for layout in layouts)
    runs = ", ".join("+".join(run) for run in plan.joined_axes)
    assert f"axes searched together: {runs}; the bound is of plans that use them so" in plan.explain()
    assert plan.to_text().splitlines()[0] == f"{mesh}  // axes searched together: {runs}"
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.joined_axes == plan.joined_axes


@pytest.fixture(scope="module")
def joint_and_ends() -> tuple[Any, Boundary]:
    torch.manual_seed(0)
    captured = canonical_capture(TwoLinear(), (torch.randn(8, 10),), {})
    return captured.joint, boundary_of(captured.joint, parameters={}, inputs={}, outputs={})


def searched(joint_and_ends: tuple[Any, Boundary], mesh: MeshSpec, joined: JoinedAxes = ()) -> Found:
    joint, ends = joint_and_ends
    return find_assignment(Sought(joint, prices_of(slow_compute(), mesh).joining(joined), ends))


def test_axes_all_together_are_as_one_axis() -> None:
    """Where no part is uneven: of uneven ones, 2 x 2 makes others than 4 does."""
    captured = canonical_capture(nn.Linear(16, 32, bias=False), (torch.randn(8, 16),), {})
    even = captured.joint, boundary_of(captured.joint, parameters={}, inputs={}, outputs={})
    one = searched(even, MeshSpec({"x": 4}))
    together = searched(even, MeshSpec({"a": 2, "b": 2}), (("a", "b"),))
    assert together.seconds == pytest.approx(one.seconds, rel=1e-12)
    assert together.peak_nbytes == one.peak_nbytes


def test_what_is_found_with_joined_axes_is_no_faster_than_what_there_is(
    joint_and_ends: tuple[Any, Boundary],
) -> None:
    mesh = MeshSpec({"a": 2, "b": 3, "c": 2})
    whole = searched(joint_and_ends, mesh)
    finer = searched(joint_and_ends, mesh, (("a", "b"),))
    coarse = searched(joint_and_ends, mesh, (("a", "b", "c"),))
    assert whole.seconds < finer.seconds < coarse.seconds
    assert whole.lower_bound < finer.lower_bound < coarse.lower_bound
    assert (whole.joined, coarse.joined) == ((), (("a", "b", "c"),))


def test_meshes_of_three_axes_are_searched_whole(joint_and_ends: tuple[Any, Boundary]) -> None:
    joint, ends = joint_and_ends
    mesh = MeshSpec(dict.fromkeys("abc", 2))
    prices = prices_of(slow_compute(), mesh)
    found = find_fastest(Sought(joint, prices, ends), NEVER)
    assert (found.joined, found.status) == ((), "optimal")
    assert found.seconds == searched(joint_and_ends, mesh).seconds


@pytest.mark.slow
def test_pins_part_the_axes_that_they_use_apart() -> None:
    pin = {"up.weight": [Shard(0), Replicate(), Replicate(), Shard(1), Shard(1)]}
    _, _, plan = linear(FIVE, constraints=pin)
    assert plan.parameter_layouts["up.weight"].dims == (("a",), ("d", "e"))
    assert {axis for run in plan.joined_axes for axis in run} <= {"b", "c", "d", "e"}
    assert not {("c", "d"), ("b", "c", "d", "e")} & {*plan.joined_axes}


def test_too_many_ways_to_use_the_axes_are_an_error() -> None:
    mesh = MeshSpec(dict.fromkeys("abcdef", 2))
    pins = {"up.weight": [Shard(0), Shard(1)] * 3}
    with pytest.raises(
        coarse_to_fine.InfeasibleError, match=r"in 6 different ways by `constraints`(.|\n)*try: "
    ):
        find_plan(TwoLinear(), mesh, (torch.randn(8, 10),), profile=slow_compute(), constraints=pins)


@pytest.mark.slow
def test_a_plan_that_fits_no_memory_says_what_was_searched() -> None:
    """States are searched with the axes that the fastest plan without a limit joins: here none."""
    with pytest.raises(
        coarse_to_fine.InfeasibleError, match=r"memory_limit=64B(.|\n)*any plan needs at least"
    ):
        linear(FIVE, memory_limit=64)
    reason = coarse_to_fine.InfeasibleError("no plan fits")
    with pytest.raises(coarse_to_fine.InfeasibleError, match=r"no plan fits\n.*together \(a\+b, or parts"):
        raise coarse_to_fine.none_together(reason, (("a", "b"),))


def test_where_time_is_short_axes_are_joined(
    joint_and_ends: tuple[Any, Boundary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing everything takes too long, and so does the second part of the axes: the best plan till then."""
    joint, ends = joint_and_ends
    joined: list[JoinedAxes] = []

    def hurried(asked: Sought, deadline: Deadline) -> Found:
        joined.append(asked.prices.joined)
        if asked.prices.joined == () or len(joined) > 3:
            raise OutOfTime
        return find_assignment(asked, deadline)

    monkeypatch.setattr(coarse_to_fine, "find_assignment", hurried)
    prices = prices_of(slow_compute(), MeshSpec(dict.fromkeys("abc", 2)))
    found = find_fastest(Sought(joint, prices, ends), NEVER)
    assert joined == [(), (("a", "b", "c"),), (("b", "c"),), (("a", "b"),)]
    assert (found.joined, found.status) == ((("b", "c"),), "feasible")
    monkeypatch.setattr(
        coarse_to_fine, "find_assignment", lambda *_: hurried(Sought(joint, prices, ends), NEVER)
    )
    with pytest.raises(OutOfTime):
        find_fastest(Sought(joint, prices, ends), NEVER)


@pytest.fixture(scope="module")
def saved() -> Any:
    return json.loads(json.dumps(one_linear()[-1].to_json()))


def test_entries_are_products_of_strategies() -> None:
    """A reader of 6 choices an axis, of a producer with 4: on three axes (6 * 4) ** 3. Two ways add up."""
    size = SpaceSize((((4,), (6,)), ((1, 2), (3,))))
    assert [size.entries(units) for units in (1, 3)] == [24 + 9, 24**3 + 9 * 27]


@pytest.mark.parametrize(
    ("joined", "problem"),
    [
        ([["a", "c"]], "are no neighbours"),
        ([["b", "a"]], "are no neighbours"),
        ([["d", "e"], ["a", "b"]], "are no neighbours"),
        ([["a", "nowhere"]], "are no neighbours"),
        ([["a"]], "are no neighbours"),
        ([["a", "b", "c", "d", "e"]], "uses the axes . and . apart, which are joined"),
    ],
)
def test_a_file_that_joins_other_axes_is_refused(saved: Any, joined: list[list[str]], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        Plan.from_json({**saved, "joined_axes": joined})
