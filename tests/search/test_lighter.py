"""Of choices that cost the same the one with fewer bytes: on random problems, and in plans."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan
from passes.search.judged_choice import lighter
from passes.solver.problem import Problem


def random_problem(seed: int) -> Problem:
    """Four nodes of three strategies, of costs 0, 1 or 2, so that many choices cost the same."""
    rng = np.random.default_rng(seed)
    some = lambda *shape: rng.integers(0, 3, shape).astype(float)
    edges = ((0, 1), (1, 2), (3, 1), (2, 3), (0, 1))
    return Problem(
        tuple(some(3) for _ in range(4)),
        edges,
        tuple(some(3, 3) for _ in edges),
        ((0, 4), (0, 2), (1, 3), (3, 4)),
        tuple(rng.integers(1, 9, 3) for _ in range(4)),
    )


def terms(problem: Problem, choice: tuple[int, ...]) -> np.ndarray:
    nodes = [costs[a] for costs, a in zip(problem.node_costs, choice, strict=True)]
    ways = zip(problem.edges, problem.edge_costs, strict=True)
    return np.array([*nodes, *(costs[choice[i], choice[j]] for (i, j), costs in ways)])


@pytest.mark.parametrize("seed", range(50))
def test_no_cost_grows_and_no_single_node_could_be_smaller(seed: int) -> None:
    problem = random_problem(seed)
    smaller = 0
    for choice in itertools.product(range(3), repeat=4):
        found = lighter(problem, choice)
        assert (terms(problem, found) <= terms(problem, choice)).all()
        assert (problem.profile(found) <= problem.profile(choice)).all()
        smaller += problem.profile(found).sum() < problem.profile(choice).sum()
        for node, other in itertools.product(range(4), range(3)):
            turned = tuple(other if i == node else a for i, a in enumerate(found))
            if (terms(problem, turned) <= terms(problem, found)).all():
                assert problem.usages[node][other] >= problem.usages[node][found[node]]
    assert smaller > 0


class Frozen(nn.Module):
    """A wide product with a weight that is not trained, so that no update says how it is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)
        self.up.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_what_may_be_stored_either_way_is_stored_in_parts() -> None:
    """Read in columns, a weight costs the same whole (each rank slices it) as split: split it is half of the bytes."""
    model = Frozen()
    columns = {"down.weight": {"tp": Shard(1)}}
    plan = find_plan(model, MeshSpec({"tp": 2}), (torch.zeros(16, 64),), profile="cpu", constraints=columns)
    assert str(plan.parameter_layouts["up.weight"]) == "[@tp, -]"
    assert plan.memory is not None
    weights = {row.name: row.nbytes for row in plan.memory.at_peak if row.kind == "parameters"}
    assert weights["up.weight"] == 4 * 64 * 512 // 2


def test_equal_plans_are_one() -> None:
    """Found twice, a plan is the same."""
    plans = [
        find_plan(Frozen(), MeshSpec({"dp": 2, "tp": 2}), (torch.zeros(16, 64),), profile="cpu")
        for _ in range(2)
    ]
    assert plans[0].fingerprint == plans[1].fingerprint
