"""States and layouts searched together: against every subset of ops computed again, and through whole plans."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard import InfeasibleError, MeshSpec, Plan, ShardingError, find_plan, verify
from autoshard.plan.find_plan import canonical_capture, prices_of
from cost_model.deadline import NEVER
from cost_model.profile import Profile
from passes.ir.joint import JointGraph
from passes.search.find_states import find_states
from passes.search.graph_ends import Boundary, boundary_of
from passes.search.limited_space import build_limited
from passes.solver.problem import Infeasible
from passes.solver.solve import solve
from passes.states.compute_again import compute_again
from passes.states.cut_points import candidates, places
from passes.strategies.prices import Prices
from tests.states.test_compute_again import Block
from tests.states.test_cut_points import Wrapped

MESH = MeshSpec({"dp": 2})


def graph_of(model: nn.Module, x: torch.Tensor) -> tuple[JointGraph, Prices, Boundary]:
    joint = canonical_capture(model, (x,), {}).joint
    boundary = boundary_of(joint, parameters={}, inputs={}, outputs={})
    return joint, prices_of(Profile.named("cpu"), MESH), boundary


def least(joint: JointGraph, prices: Prices, boundary: Boundary, limit: int) -> float:
    """Of all subsets of ops computed again, with the best layouts of each: the fewest seconds, by brute force."""
    names = [node.name for node in candidates(joint, places(joint))]
    found = float("inf")
    for count in range(len(names) + 1):
        for again in itertools.combinations(names, count):
            space = build_limited(compute_again(joint, again), prices, boundary, memory_limit=limit)
            try:
                found = min(found, solve(space.problem).cost)
            except Infeasible:
                continue
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_the_least_of_all_subsets(seed: int) -> None:
    """Within 3 % of memory and 1 % of time: what is offered lives a little longer or shorter than what runs."""
    torch.manual_seed(seed)
    width = 8 * (seed + 2)
    model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)).double()
    joint, prices, boundary = graph_of(model, torch.randn(32 * (seed + 1), 8, dtype=torch.float64))
    space = build_limited(joint, prices, boundary, memory_limit=10**12)
    peak = space.problem.peak(solve(space.problem).choice)[0]
    for share in (1.0, 0.7):
        states = find_states(
            joint, prices, boundary, room=int(share * peak), limit=(int(share * peak), 0), deadline=NEVER
        )
        # Copies of fewer ops stand nearer to their readers: a subset may need a little less than was offered.
        assert states.lower_bound <= least(joint, prices, boundary, int(0.97 * share * peak)) * (1 + 1e-9)
        assert states.lower_bound >= least(joint, prices, boundary, int(1.03 * share * peak)) * 0.99


def blocks(count: int = 3) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(8) for _ in range(count)]).double(), torch.randn(
        16, 20, 8, dtype=torch.float64
    )


@pytest.fixture(scope="module")
def free() -> Plan:
    model, x = blocks()
    return find_plan(model, MeshSpec({"dp": 2, "tp": 2}), (x,))


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_a_limit_is_met_by_computing_again(free: Plan, share: float, tmp_path: Path) -> None:
    model, x = blocks()
    limit = int(share * free.peak_memory)
    plan = find_plan(model, free.mesh, (x,), memory_limit=limit)
    assert plan.peak_memory <= limit
    assert plan.lowering.again
    assert plan.lower_bound <= plan.cost
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.lowering.again == plan.lowering.again
    assert verify(model, loaded, (x,)).ok


def test_without_a_limit_that_binds_nothing_changes(free: Plan) -> None:
    model, x = blocks()
    plan = find_plan(model, free.mesh, (x,), memory_limit=2 * free.peak_memory)
    assert plan.lowering.again == ()
    assert plan.records == free.records


def test_what_the_user_checkpoints_is_computed_again() -> None:
    torch.manual_seed(0)
    model, x = Wrapped(True).double(), torch.randn(4, 5, 4, dtype=torch.float64)
    plan = find_plan(model, MESH, (x,), recompute="user")
    assert any(name.startswith("contract") for name in plan.lowering.again)
    assert verify(model, plan, (x,)).ok
    assert find_plan(model, MESH, (x,)).lowering.again == ()


def test_too_little_for_any_states_says_what_would_do() -> None:
    model, x = blocks(1)
    with pytest.raises(InfeasibleError, match="try: memory_limit="):
        find_plan(model, MESH, (x,), memory_limit=50_000)


@pytest.mark.parametrize("wrong", ["none", None, True])
def test_recompute_is_one_of_two_words(wrong: object) -> None:
    model, x = blocks(1)
    with pytest.raises(ShardingError, match="recompute"):
        find_plan(model, MESH, (x,), recompute=wrong)  # type: ignore[arg-type]
