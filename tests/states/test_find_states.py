"""States and layouts searched together: against every subset of ops computed again, and through whole plans."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard import InfeasibleError, MeshSpec, Plan, ShardingError, find_plan, verify
from cost_model.deadline import NEVER
from passes.search.find_states import NoStates, OfferedStates
from tests.states.random_graphs import least_seconds, small_graph, within
from tests.states.test_compute_again import Block
from tests.states.test_cut_points import Wrapped

MESH = MeshSpec({"dp": 2})
ROOMS = (0.8, 0.6)
"""Of the peak of the fastest plan without a limit."""
ELSEWHERE = 0.1
"""Share of the room by which what is offered may count more or less. A copy of a subset stands before its own first
reader; where more is offered, before the first of all."""


def check_states(seed: int, most: int) -> None:
    """Searched together, states and layouts take what the best of all subsets takes with its best layouts."""
    graph = small_graph(seed, most)
    spaces = graph.spaces()
    free = within(spaces[0], graph.prices, 2**60)
    peak = spaces[0].problem.peak(free.choice)[0]
    offered = OfferedStates.of(graph.joint, graph.prices, graph.boundary)
    for share in ROOMS:
        room = int(share * peak)
        try:
            states = offered.find(room=room, limit=(room, 0), deadline=NEVER)
        except NoStates:
            assert least_seconds(spaces, graph.prices, int((1 - ELSEWHERE) * room)) == math.inf
            continue
        assert states.nbytes <= room
        less, more = (
            least_seconds(spaces, graph.prices, int(share * room)) for share in (1 - ELSEWHERE, 1 + ELSEWHERE)
        )
        assert more * (1 - 1e-9) <= states.seconds <= less * (1 + 1e-9)
        assert states.lower_bound == pytest.approx(states.seconds, rel=1e-6)


@pytest.mark.parametrize("seed", [2, 4, 0, 1, 3, 5, 6, 7])  # CI runs the first, the smallest
def test_states_and_layouts_are_the_best_of_all_subsets(seed: int) -> None:
    check_states(seed, most=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_more_random_graphs(seed: int) -> None:
    check_states(seed, most=5)


def blocks(count: int = 2) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(8) for _ in range(count)]).double(), torch.randn(
        16, 20, 8, dtype=torch.float64
    )


@pytest.fixture(scope="module")
def free() -> Plan:
    model, x = blocks()
    return find_plan(model, MeshSpec({"dp": 2, "tp": 2}), (x,))


@pytest.mark.parametrize("share", [0.8, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_limit_is_met_by_computing_again(free: Plan, share: float, tmp_path: Path) -> None:
    model, x = blocks()
    limit = int(share * free.peak_memory)
    plan = find_plan(model, free.mesh, (x,), memory_limit=limit)
    assert plan.peak_memory <= limit
    assert plan.planned.again
    assert plan.lower_bound <= plan.cost
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.planned.again == plan.planned.again
    assert verify(model, loaded, (x,)).ok


def test_without_a_limit_that_binds_nothing_changes(free: Plan) -> None:
    model, x = blocks()
    plan = find_plan(model, free.mesh, (x,), memory_limit=2 * free.peak_memory)
    assert plan.planned.again == ()
    assert plan.records == free.records


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_the_user_checkpoints_is_computed_again(reentrant: bool) -> None:
    torch.manual_seed(0)
    # Of a reentrant one torch gives gradients only where what it is given needs one.
    model = nn.Sequential(nn.Linear(4, 4), Wrapped(True, reentrant)).double()
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    plan = find_plan(model, MESH, (x,), recompute="user")
    assert any(name.startswith("contract") for name in plan.planned.again)
    assert verify(model, plan, (x,)).ok
    assert find_plan(model, MESH, (x,)).planned.again == ()


def test_too_little_for_any_states_says_what_would_do() -> None:
    model, x = blocks(1)
    with pytest.raises(InfeasibleError, match="try: memory_limit="):
        find_plan(model, MESH, (x,), memory_limit=50_000)


@pytest.mark.parametrize("wrong", ["none", None, True])
def test_recompute_is_one_of_two_words(wrong: object) -> None:
    model, x = blocks(1)
    with pytest.raises(ShardingError, match="recompute"):
        find_plan(model, MESH, (x,), recompute=wrong)  # type: ignore[arg-type]
