"""Starts of buckets in the bound, against brute force over all choices, and on a model whose gradients fill none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from autoshard import MeshSpec, find_plan
from passes.search.bucket_starts import BucketStarts
from passes.solver.problem import Problem
from passes.solver.solve import solve
from tests.solver.oracle import random_problem


def with_starts(problem: Problem, starts: BucketStarts) -> float:
    """The least seconds with starts, of all choices."""
    choices = itertools.product(*(range(len(vector)) for vector in problem.node_costs))
    return min(problem.cost(choice) + starts.of(problem, choice) for choice in choices)


def random_starts(problem: Problem, seed: int) -> BucketStarts:
    """Of every second edge, of a few sizes, and none where nothing moves."""
    rng = np.random.default_rng(seed)
    levels = np.array([0.0, 0.0, 2.0, 3.0, 7.0])
    edges = range(0, len(problem.edges), 2)
    return BucketStarts({e: rng.choice(levels, problem.edge_costs[e].shape) for e in edges})


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_takes_less_than_the_bound(seed: int) -> None:
    problem = replace(random_problem(seed), limit=None)
    starts = random_starts(problem, seed)
    taken = with_starts(problem, starts)
    if not np.isfinite(taken):
        return
    least, solved = solve(problem), lambda seconds: solve(starts.without(problem, seconds), relative_gap=0.15)
    bound = starts.bound(least.lower_bound, taken + seed % 7, solved)
    assert least.lower_bound <= bound <= taken * (1.0 + 1e-9)


def test_the_start_is_proven_where_all_else_is_slower() -> None:
    """Reducing takes 1 second and a start of 4; splitting nothing 9. The objective counts 1, and 5 is the least."""
    problem = Problem((np.zeros(1), np.zeros(2)), ((0, 1),), (np.array([[1.0, 9.0]]),))
    starts = BucketStarts({0: np.array([[4.0, 0.0]])})
    assert with_starts(problem, starts) == 5.0
    bound = starts.bound(1.0, 5.0, lambda seconds: solve(starts.without(problem, seconds)))
    assert bound == pytest.approx(5.0)


def test_gradients_that_fill_no_bucket_pay_its_start_in_the_bound() -> None:
    """On 4 CPU ranks the start of one reduction is an eighth of a step of this model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    plan = find_plan(model, MeshSpec({"dp": 4}), (torch.randn(4096, 64),), profile="cpu")
    reductions = [one for one in plan.collectives if one.phase == "backward"]
    assert {one.kind for one in reductions} == {"all_reduce"}
    assert plan.gap < 0.03
