"""A better program takes over between two steps: parameters, gradients and optimizer states go to its layouts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from operator import is_
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard import is_tuned
from autoshard.plan.division import Division
from autoshard.plan.plan import Plan
from autoshard.plan.plan_ends import resolve_pins
from autoshard.plan.task import CallLayouts, search_plan
from autoshard.runtime import session, tuning
from autoshard.runtime.beside import Better, Talk
from autoshard.runtime.making import Call
from autoshard.runtime.planner import Planner
from cost_model.deadline import Deadline
from cost_model.errors import InfeasibleError
from passes.capture import Captured
from tests.api.programs import assert_close, data, full, parallel, two_linear
from tests.ranks import RankPool

Pins = dict[str, Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


def pins(axes: int, better: bool) -> Pins:
    """Replicated; or, along the last axis, columns and then rows."""
    whole = [Replicate()] * axes
    cut = lambda dim: [*whole[1:], Shard(dim)]
    if not better:
        return {"*": whole}
    return {"up.weight": cut(0), "up.bias": cut(0), "down.weight": cut(1), "down.bias": whole}


def finds(patch: pytest.MonkeyPatch, model: nn.Module, better: Pins) -> None:
    """The search beside the steps finds a plan with these pins."""

    def search(planner: Planner, call: Call, first: Any, store: Any) -> Callable[[Talk], None]:
        held = resolve_pins(better, dict(model.named_parameters()), planner.spec)
        task = planner.task(call.whole, call.layouts, held)
        return lambda talk: talk.send(Better(search_plan(task).to_json()))

    patch.setattr(session, "search_beside", search)


def starts_poorly(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    """By a plan that holds all parameters whole; what is better is left to the search."""

    def quick(planner: Planner, captured: Captured, layouts: CallLayouts, store: Any) -> tuple[Plan, bool]:
        held = resolve_pins(pins(1, better=False), dict(model.named_parameters()), planner.spec)
        found = search_plan(planner.task(captured, layouts, held))
        return replace(found, lower_bound=0.0), False  # of all plans it is not known

    patch.setattr(Planner, "_quick", quick)


def searched(rank: int) -> tuple[list[float], float, float]:
    """Losses, and the predicted steps of the first plan and of the one that the search beside the steps found."""
    model = two_linear().double()
    with pytest.MonkeyPatch.context() as patch:
        starts_poorly(patch, model)
        patch.setattr(tuning, "SLOWER", 1e9)
        parallel(model, (("x", 2),), (data()[0].double(),))
        step = steps_of(model, OPTIMIZERS["adamw"](model.parameters()), accumulated=False)
        losses = [step(0)]
        first = model.autoshard_plan
        while not is_tuned(model):
            losses.append(step(len(losses)))
    losses.extend([step(number) for number in range(len(losses), len(losses) + 3)])
    return losses, first.step_time, model.autoshard_plan.step_time  # type: ignore[union-attr]


def test_the_search_beside_the_steps_ends_and_its_plan_takes_over(ranks: RankPool) -> None:
    for losses, first, now in ranks.run(searched, world=2):
        alone = two_linear().double()
        step = steps_of(alone, OPTIMIZERS["adamw"](alone.parameters()), accumulated=False)
        assert_close(losses, [step(number) for number in range(len(losses))], 1e-12)
        assert now < 0.98 * first


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, accumulated: bool) -> Callable[[int], float]:
    x, y = (one.double() for one in data())

    def step(number: int) -> float:
        time.sleep(0.02)  # what is done beside is done after a few steps
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if not accumulated or number % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return step


def tuned(rank: int, axes: Any, kind: str, backend: str, accumulated: bool) -> tuple[list[float], Any]:
    """Losses until some steps after the plan was exchanged, and all values then."""
    model = two_linear().double()
    with pytest.MonkeyPatch.context() as patch:
        finds(patch, model, pins(len(axes), better=True))
        patch.setattr(tuning, "SLOWER", 1e9)
        parallel(
            model, axes, (data()[0].double(),), constraints=pins(len(axes), better=False), backend=backend
        )
        held = list(model.parameters())
        optimizer = OPTIMIZERS[kind](held)
        step = steps_of(model, optimizer, accumulated)
        losses = [step(0)]
        first = model.autoshard_plan
        while not is_tuned(model) or model.autoshard_plan is first:
            losses.append(step(len(losses)))
        losses.extend([step(number) for number in range(len(losses), len(losses) + 5)])
    assert all(map(is_, held, model.parameters()))
    assert isinstance(model.up.weight, DTensor)
    assert list(model.up.weight.placements) == pins(len(axes), better=True)["up.weight"]
    with torch.no_grad():  # another kind of call, for the new layouts
        losses.append(F.mse_loss(model(data(6)[0].double()), data(6)[1].double()).item())
    states = [full(optimizer.state[p]) for p in model.parameters()]
    return losses, [full(dict(model.named_parameters())), states]


@pytest.mark.parametrize(
    ("axes", "kind", "backend", "accumulated"),
    [
        ((("x", 2),), "adamw", "eager", False),
        ((("x", 2),), "momentum", "eager", True),
        pytest.param((("x", 2), ("y", 2)), "adamw", "eager", False, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(
    axes: Any, kind: str, backend: str, accumulated: bool, ranks: RankPool
) -> None:
    world = 2 ** len(axes)
    for losses, values in ranks.run(tuned, axes, kind, backend, accumulated, world=world):
        alone = two_linear().double()
        optimizer = OPTIMIZERS[kind](alone.parameters())
        step = steps_of(alone, optimizer, accumulated)
        wanted = [step(number) for number in range(len(losses) - 1)]
        with torch.no_grad():
            wanted.append(F.mse_loss(alone(data(6)[0].double()), data(6)[1].double()).item())
        assert_close(losses, wanted, 1e-12)
        states = [full(optimizer.state[p]) for p in alone.parameters()]
        assert_close(values, [full(dict(alone.named_parameters())), states], 1e-12)


def late(rank: int) -> tuple[int, bool]:
    """How often a plan was looked for, where none is found in little time; whether there is one."""
    searches: list[Deadline] = []
    fastest = Division.fastest

    def slow(self: Division, task: Any, deadline: Deadline, search: Any) -> Any:
        searches.append(deadline)
        if len(searches) > 1:
            return fastest(self, task, deadline, search)
        time.sleep(max(0.0, deadline.left))
        raise InfeasibleError("nothing yet")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Division, "fastest", slow)
        model = parallel(two_linear(), (("x", 2),), (data()[0],), refine="off", tune="background", gap=0.02)
    return len(searches), isinstance(model.autoshard_plan, Plan)


def test_a_plan_that_takes_longer_than_a_first_one_may_is_found(ranks: RankPool) -> None:
    """Until `time_limit`: rank 0 searches."""
    (first, found), (_, other) = ranks.run(late, world=2)
    assert first >= 2 and found and other


def pieces_of_starts(rank: int) -> list[int]:
    """Of a start that asks for none, and of one after it that asks for two."""
    x = data()[0]
    starts = ({"tune": "background"}, {"tune": "background", "micro_batches": 2})
    return [parallel(two_linear(), (("x", 2),), (x,), **s).autoshard_plan.micro_batches for s in starts]  # type: ignore


def test_what_an_earlier_start_ended_with_is_taken_where_the_same_is_asked_for(ranks: RankPool) -> None:
    for pieces in ranks.run(pieces_of_starts, world=2):
        assert pieces == [1, 2]
