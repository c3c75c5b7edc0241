"""What `benchmarks.objective` holds against a plan, and what it calls a failure."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from autoshard.plan.families import FAMILIES
from autoshard.plan.plan import Plan
from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planning import canonical_capture
from benchmarks.objective import failures
from benchmarks.rivals.cases import NETWORKS
from benchmarks.rivals.changes import changes, choice_of, layers_of
from benchmarks.rivals.drawn import KINDS, drawn
from benchmarks.rivals.families import families
from benchmarks.rivals.rivals import Contest, Rival, contest
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.layout.layout import Layout
from passes.search.search_space import SearchSpace
from passes.search.strategy_space import SpaceBuilder
from passes.solver.problem import Problem
from passes.solver.solve import restricted, solve
from tests.models import SwiGLU, seeded
from tests.plans.patterns import Regression

MESH = MeshSpec({"dp": 2, "tp": 4}, device_type="cuda")
SHAPES = {
    "layers.0.mlp.up_proj.weight": (64, 16),
    "layers.0.mlp.down_proj.weight": (16, 64),
    "norm.weight": (6,),
}


@pytest.fixture(scope="module")
def task() -> Task:
    model, inputs = seeded("llama", batch=8)
    captured = canonical_capture(model, (), inputs, device=torch.device("cuda"))
    call = CallLayouts({}, {1: None})
    return Task(captured, Profile.named("h100"), MESH, call, {}, None, "inductor", 60.0)


@pytest.fixture(scope="module")
def plan(task: Task) -> Plan:
    return search_plan(task)


@pytest.fixture(scope="module")
def space(task: Task) -> SearchSpace:
    return SpaceBuilder(task.joint, task.prices, task.boundary).built()


def layouts(name: str) -> dict[str, str]:
    pins = families(NETWORKS["llama-3-8b"], SHAPES, MESH)[name]
    return {parameter.rsplit(".", 2)[-2]: str(layout) for parameter, layout in pins.items()}


def test_a_replicated_family_splits_nothing() -> None:
    assert set(layouts("replicated").values()) == {"[-, -]", "[-]"}


def test_zero_splits_the_first_dim_that_is_long_enough() -> None:
    assert layouts("ZeRO over dp x tp") == {
        "up_proj": "[@dp@tp, -]",
        "down_proj": "[@dp@tp, -]",
        "norm": "[-]",
    }
    assert layouts("ZeRO over tp, replicated over the others")["norm"] == "[@tp]"


def test_zero_of_tensor_parallelism_is_inside_of_it() -> None:
    """Gathering over dp leaves each rank what tensor parallelism gives it."""
    assert layouts("tensor over tp, ZeRO over dp") == {
        "up_proj": "[@tp@dp, -]",
        "down_proj": "[@dp, @tp]",
        "norm": "[@dp]",
    }
    assert layouts("tensor over tp, replicated over dp") == {
        "up_proj": "[@tp, -]",
        "down_proj": "[-, @tp]",
        "norm": "[-]",
    }


def test_the_vocabulary_is_split_where_asked() -> None:
    pins = families(NETWORKS["llama-3-8b"], {"lm_head.weight": (96, 32)}, MESH)
    assert pins["tensor and vocabulary over tp, ZeRO over dp"] == {
        "lm_head.weight": Layout((("tp", "dp"), ()))
    }
    assert pins["tensor over tp, ZeRO over dp"] == {"lm_head.weight": Layout((("dp",), ()))}


def test_a_restricted_problem_is_the_best_of_what_is_left() -> None:
    """Against all choices of five nodes."""
    generator = np.random.default_rng(0)
    edges = ((0, 1), (2, 1), (3, 2), (0, 4))
    costs = tuple(generator.random(3) for _ in range(5))
    between = tuple(generator.random((3, 3)) for _ in edges)
    problem = Problem(
        costs, edges, between, ((0, 2),) * 5, tuple(np.arange(3.0) for _ in range(5)), limit=6.0
    )
    allowed = {1: (2,), 3: (0, 2)}
    found = solve(restricted(problem, allowed)).cost
    options = [allowed.get(node, (0, 1, 2)) for node in range(5)]
    assert found == pytest.approx(
        min(problem.cost(c) for c in itertools.product(*options) if problem.fits(c))
    )


def test_the_choice_of_a_plan_is_its_assignment(plan: Plan, space: SearchSpace) -> None:
    found = space.assignment(choice_of(space, plan.planned.layouts))
    assert found == {name: layouts for name, layouts in plan.planned.layouts.items() if name in found}
    assert space.problem.cost(choice_of(space, plan.planned.layouts)) < np.inf


def test_a_change_is_in_one_layer(task: Task, plan: Plan, space: SearchSpace) -> None:
    layers = layers_of(task.joint, space)
    assert {"model.layers.0", "model.layers.1", "lm_head", "model.norm"} <= set(layers)
    found = list(changes(task.joint, space, plan.planned.layouts, 12))
    assert len(found) == 12
    for change in found:
        inside = {space.names[node] for node in layers[change.layer]}
        differing = {
            name for name, layouts in change.assignment.items() if layouts != plan.planned.layouts[name]
        }
        assert change.node in differing and differing <= {*inside, "output"}  # the ends: gradients' layouts


def test_changes_are_different_plans(task: Task, plan: Plan, space: SearchSpace) -> None:
    found = [choice_of(space, c.assignment) for c in changes(task.joint, space, plan.planned.layouts, 12)]
    assert len({choice_of(space, plan.planned.layouts), *found}) == 13


def test_all_groups_are_in_a_contest() -> None:
    """A plan for a machine that overlaps as much as the task's is judged as the task's own."""
    rows = torch.zeros(64, 16)
    captured = canonical_capture(Regression(SwiGLU(16, 32)), (rows, rows), {}, device=torch.device("cuda"))
    profile = replace(Profile.named("h100"), overlap_efficiency=0.5)
    mesh, call = MeshSpec({"dp": 4}, device_type="cuda"), CallLayouts({}, {})
    noted: list[Rival] = []
    task = Task(captured, profile, mesh, call, {}, None, "inductor", 60.0)
    found = contest(NETWORKS["llama-3-8b"], task, 3, note=noted.append)
    assert noted == list(found.rivals)
    seconds = {rival.name: rival.seconds for rival in noted}
    assert seconds["overlap 0.5"] == pytest.approx(found.plan.step_time, rel=1e-9)
    groups = [rival.group for rival in noted]
    assert groups == ["pinned"] * 4 + ["family"] * len(FAMILIES) + ["assumed"] * 4 + ["changed"] * 3
    assert (seconds["DDP"] or 0.0) >= (seconds["replicated"] or 0.0) * (1.0 - 1e-9) > 0.0


def test_models_drawn_by_a_number_are_the_same_and_differ() -> None:
    titles = [drawn(number).title for number in range(40)]
    assert titles == [drawn(number).title for number in range(40)]
    assert {title.partition(" ")[0] for title in titles} == set(KINDS) and len(set(titles)) > 35


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_drawn_models_return_a_loss(kind: str) -> None:
    with torch.device("meta"):
        _, model, inputs = KINDS[kind](random.Random(0))
        assert model(*inputs).shape == ()


def contested(cost: float, *seconds: float | None) -> Contest:
    plan = SimpleNamespace(cost=cost, step_time=1.0)
    return Contest(cast(Any, plan), tuple(Rival("pinned", f"rival {i}", s) for i, s in enumerate(seconds)))


def test_a_near_cost_and_a_near_rival_are_no_failure() -> None:
    assert failures("a", contested(1.019, None, 0.991, 1.5)) == []
    assert failures("a", contested(0.981, None)) == []


def test_failures_say_by_how_much() -> None:
    assert failures("a", contested(0.97, 1.2)) == ["a: the cost differs from the step by -3.0%"]
    assert failures("a", contested(1.0, 1.2, 0.98)) == ["a: pinned rival 1 takes 0.980 of its step"]


def test_a_change_that_cannot_be_lowered_is_a_failure() -> None:
    rival = Rival("changed", "relu as [@dp]", None, "no redistribution")
    found = Contest(contested(1.0).plan, (rival,))
    assert failures("a", found) == ["a: changed relu as [@dp] cannot be lowered: no redistribution"]
