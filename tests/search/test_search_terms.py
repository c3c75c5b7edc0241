"""A search that starts from a known plan, and one that ends where it is near its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoshard import MeshSpec
from autoshard.plan.judged import prices_of
from autoshard.planning import canonical_capture
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.search.find import Found, Sought, find_assignment
from passes.search.overlapped import solve_overlapped
from passes.search.search_space import SearchSpace
from passes.search.search_terms import Boundary, SearchStart, boundary_of
from passes.search.strategy_space import SpaceBuilder
from passes.solver.problem import Solution
from tests.models import TwoLinear, llama
from tests.profiles import slow_compute

MESH = MeshSpec({"a": 2, "b": 2})


def graph(outputs: dict[int, Any] | None = None) -> tuple[JointGraph, Boundary]:
    torch.manual_seed(0)
    joint = canonical_capture(TwoLinear(), (torch.randn(8, 10),), {}).joint
    return joint, boundary_of(joint, parameters={}, inputs={}, outputs=outputs or {})


def space_and_found(joint: JointGraph, ends: Boundary) -> tuple[SearchSpace, Found]:
    prices = prices_of(slow_compute(), MESH)
    return SpaceBuilder(joint, prices, ends).built(), find_assignment(Sought(joint, prices, ends))


@pytest.mark.parametrize("outputs", [None, {0: Layout((("a",), ()))}, {0: None}])
def test_a_plan_is_found_again_among_the_strategies(outputs: dict[int, Any] | None) -> None:
    space, found = space_and_found(*graph(outputs))
    choice = SearchStart(found.assignment).choice(space)
    assert choice is not None
    assert space.assignment(choice) == found.assignment
    assert space.problem.cost(choice) < float("inf")


def test_a_plan_that_the_space_does_not_have_is_no_start() -> None:
    space, found = space_and_found(*graph())
    name = next(name for name, held in found.assignment.items() if held.operands and name != "output")
    odd = replace(found.assignment[name], splits=())
    assert odd != found.assignment[name]
    assert SearchStart({**found.assignment, name: odd}).choice(space) is None
    assert SearchStart().choice(space) is None


def test_a_search_ends_within_its_gap() -> None:
    """Whatever it finds is within a fifth of the bound that it states, and that is no more than the proven plan's."""
    model, arguments = llama(layers=1)
    joint = canonical_capture(model, (), arguments).joint
    ends = boundary_of(joint, parameters={}, inputs={}, outputs={})
    prices = prices_of(slow_compute(), MESH)
    proven = find_assignment(Sought(joint, prices, ends))
    rough = find_assignment(Sought(joint, prices, ends, start=SearchStart(gap=0.2)))
    assert rough.seconds <= rough.lower_bound / (1.0 - 0.2) + 1e-12
    assert rough.lower_bound <= proven.seconds * (1.0 + 1e-9)
    assert rough.seconds >= proven.lower_bound * (1.0 - 1e-9)


def test_the_first_search_starts_from_the_plan_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    joint, ends = graph()
    space, found = space_and_found(joint, ends)
    begun: list[tuple[object, object]] = []

    def spied(*arguments: Any, **options: Any) -> Solution:
        begun.append((options["warm"], options["relative_gap"]))
        return solve_overlapped(*arguments, **options)

    monkeypatch.setattr("passes.search.rival_choices.solve_overlapped", spied)
    start = SearchStart(found.assignment, 0.1)
    find_assignment(Sought(joint, prices_of(slow_compute(), MESH), ends, start=start))
    ((warm, gap),) = begun
    assert warm == start.choice(space) and gap == pytest.approx(0.09)
