"""Races of plans that run a batch in pieces or a model in stages: what is kept, what is left alone, what trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard import PipelinePlan
from autoshard.runtime import starting
from autoshard.runtime.trial_run import RaceEntry, Track
from passes.stages.pipeline_orders import ORDERS
from tests.api.programs import Axes, assert_close, full, parallel, two_linear
from tests.api.programs import trained as trained_outputs
from tests.ranks import RankPool
from tests.runtime.test_race import LINE, written
from tests.runtime.test_stages import BATCH, CASES, TWO, made, one_process, trained

CASES_RACED: dict[str, tuple[str, Axes, dict[str, Any]]] = {
    "pieces": ("mlp", LINE, {"micro_batches": 2}),
    "stages": ("mlp", TWO, {"stages": "pp", "micro_batches": 4}),
    "tied": ("gpt2-small", TWO, {"stages": "pp", "micro_batches": 2}),
    "either": ("mlp", TWO, {"stages": "auto", "micro_batches": "auto"}),
}


def raced(rank: int, case: str, staged_wins: bool | None) -> tuple[Any, bool, list[str], Any, str]:
    """What it trains; whether the race left the model alone; who ran; the plan's schedule and pieces; what it says.

    staged_wins: whether the clock says that plans with stages are faster; None: it says what it measured."""
    name, axes, options = CASES_RACED[case]
    model = made(name)
    args, kwargs = CASES[name].call(BATCH)
    x = (*args, *kwargs.values())[0]
    before, alone = written(model, x), []
    won, step = starting._won, Track.step
    staged: dict[str, bool] = {}

    def watched(mesh: Any, starters: Any, limit: Any) -> Any:
        for one in starters:
            staged[one.candidate.name] = isinstance(one.candidate.plan, PipelinePlan)
        found = won(mesh, starters, limit)
        alone.append(all(map(torch.equal, before, written(model, x))))
        return found

    def told(track: Track, name: str, entry: RaceEntry) -> float:
        step(track, name, entry)
        return 1.0 if staged[name] is staged_wins else 9.0

    starting._won = watched
    if staged_wins is not None:
        Track.step = told  # type: ignore[method-assign]
    try:
        parallel(model, axes, race=3, **options)
        model(*args, **kwargs)
    finally:
        starting._won, Track.step = won, step  # type: ignore[method-assign]
    plan = model.autoshard_plan
    assert [one.measured for one in plan.race] == sorted(one.measured for one in plan.race)
    kind = plan.schedule if isinstance(plan, PipelinePlan) else "none"
    names = [one.name for one in plan.race]
    return trained(name, model, 2), alone == [True], names, (kind, plan.micro_batches), plan.explain()


@pytest.mark.parametrize(
    "case",
    ["stages", "tied", "pieces"],
)
def test_training_is_as_without_a_race(ranks: RankPool, case: str) -> None:
    name, _, options = CASES_RACED[case]
    wanted = one_process(name, 2)
    replies = ranks.run(raced, case, None, world=2)
    for found, alone, names, (kind, pieces), said in replies:
        assert_close(found, wanted, CASES[name].tolerance)
        assert alone and pieces == options["micro_batches"]
        assert len(names) == 3 and f"raced, 3 plans: {names[0]} is kept" in said
        assert (kind in ORDERS) == (case != "pieces")
    assert len({(*reply[2], *reply[3], reply[4]) for reply in replies}) == 1


@pytest.mark.parametrize("staged_wins", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_clock_says_whether_there_are_stages(ranks: RankPool, staged_wins: bool) -> None:
    """The call is cut as the winner has it, whatever the search's plan was."""
    wanted = one_process("mlp", 2)
    for found, alone, names, (kind, pieces), _ in ranks.run(raced, "either", staged_wins, world=2):
        assert_close(found, wanted, CASES["mlp"].tolerance)
        assert alone and len(names) > 1
        assert (kind in ORDERS, pieces > 1) == (staged_wins, staged_wins)


def outputs_raced(rank: int, count: int | None) -> tuple[list[float], Any, int]:
    """A model without a loss, whose pieces the backward runs again."""
    model = two_linear()
    if count is not None:
        parallel(model, LINE, micro_batches=2, race=count)
    losses = trained_outputs(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    return losses, full(model.state_dict()), 0 if count is None else len(model.autoshard_plan.race)


@pytest.mark.slow
def test_without_a_loss(ranks: RankPool) -> None:
    wanted = outputs_raced(0, None)
    for losses, state, ran in ranks.run(outputs_raced, 2, world=2):
        assert_close((losses, state), wanted[:2])
        assert ran == 2
