"""A batch in pieces on real processes: losses, gradients and updates of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import InfeasibleError, MeshSpec, Plan, PlanError, ShardingError, find_plan, report
from tests.api.programs import Axes, assert_close, full, parallel
from tests.micro_batches.test_in_pieces import LossAndLogits, Normed, Tokens
from tests.plans.test_head_pieces import LIMIT, speaker
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.states.test_compute_again import Attending

LINE: Axes = (("dp", 4),)
SQUARE: Axes = (("dp", 2), ("tp", 2))
THREE: Axes = (("dp", 3),)


def tokens(batch: int = 10) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Tokens(tied=True).double()
    model.drop.p = 0.0
    return model, torch.randint(0, 20, (batch, 6))


def steps(model: nn.Module, x: Tensor, count: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(count):
        loss = model(x)
        optimizer.zero_grad()
        (loss * 3.0).backward()
        optimizer.step()
        losses.append(float(full(loss)))
    return losses, full(model.state_dict())


def training(rank: int, axes: Axes, count: int) -> tuple[list[float], dict[str, Tensor]]:
    model, x = tokens()
    parallel(model, axes, (x,), micro_batches=count)
    assert model.autoshard_plan.micro_batches == count
    found = steps(model, x)
    model.eval()
    assert full(model(x)).shape == ()
    return found


@pytest.mark.parametrize(
    ("axes", "count"),
    [
        pytest.param(LINE, 5, marks=pytest.mark.slow),
        (SQUARE, 4),
        pytest.param(THREE, 4, marks=pytest.mark.slow),
        pytest.param(LINE, 2, marks=pytest.mark.slow),
        pytest.param(SQUARE, 5, marks=pytest.mark.slow),
    ],
)
def test_losses_and_updates_of_one_process(ranks: RankPool, axes: Axes, count: int) -> None:
    wanted = steps(*tokens())
    world = 3 if axes == THREE else 4
    for found in ranks.run(training, axes, count, world=world):
        assert_close(found, wanted, 1e-12)


def speaking(rank: int, limit: int | None) -> tuple[list[float], dict[str, Tensor]]:
    """The head in pieces where a limit asks for it; then an epoch's last batch, and a call without gradients."""
    model, ids = speaker()
    parallel(model, (("dp", 2),), (ids,), memory_limit=limit)
    assert model.autoshard_plan.head_pieces == 4
    losses, _ = steps(model, ids)
    losses += steps(model, ids[:3])[0]
    with torch.no_grad():
        losses.append(float(full(model(ids))))
    return losses, full(model.state_dict())


@pytest.mark.slow
def test_the_head_in_pieces(ranks: RankPool) -> None:
    model, ids = speaker()
    wanted, _ = steps(model, ids)
    wanted += steps(model, ids[:3])[0]
    wanted.append(float(model(ids).detach()))
    for found in ranks.run(speaking, LIMIT, world=2):
        assert_close(found, (wanted, model.state_dict()), 1e-12)


def dropping(rank: int, count: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, x = Tokens().double(), torch.randint(0, 20, (8, 6))
    torch.manual_seed(1)
    parallel(model, SQUARE, (x,), micro_batches=count)
    return steps(model, x)


@pytest.mark.slow
def test_dropout_is_that_of_the_whole_batch(ranks: RankPool) -> None:
    wanted = ranks.run(dropping, 1, world=4)[0]
    for found in ranks.run(dropping, 4, world=4):
        assert_close(found, wanted, 1e-12)


def outside(rank: int, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """The loss is not in the model: each piece runs again in the backward. Gradients add up, a graph is retained."""
    torch.manual_seed(0)
    model, x = Attending().double(), torch.randn(6, 6, 8, dtype=torch.float64)
    parallel(model, SQUARE, (x,), micro_batches=count)
    y = model(x)
    y.square().sum().backward(retain_graph=True)
    first = [full(p.grad) for p in model.parameters()]
    y.square().sum().backward()
    return first, [full(p.grad) for p in model.parameters()]


def test_a_loss_outside_the_model(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model, x = Attending().double(), torch.randn(6, 6, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    wanted = [p.grad for p in model.parameters()]
    for first, second in ranks.run(outside, 4, world=4):
        assert_close(first, wanted, 1e-12)
        assert_close(second, [2.0 * g for g in wanted if g is not None], 1e-12)


def besides(rank: int) -> str:
    torch.manual_seed(0)
    model, x = LossAndLogits().double(), torch.randint(0, 20, (8, 6))
    parallel(model, LINE, (x,), micro_batches=2)
    loss, logits = model(x)
    loss.backward(retain_graph=True)
    try:
        logits.sum().backward()
    except ShardingError as error:
        return str(error)
    return "accepted"


def test_a_gradient_besides_the_loss_is_an_error_on_all_ranks(ranks: RankPool) -> None:
    replies = ranks.run(besides, world=4)
    assert all("outputs [1] get a gradient besides the loss" in reply for reply in replies)


def uncut(rank: int) -> list[str]:
    found: list[str] = []
    model, x = Normed(), torch.randn(8, 4)
    for arguments in (
        {"micro_batches": 2},
        {"micro_batches": 9},
        {"micro_batches": 0},
        {"micro_batches": 2.0},
    ):
        try:
            parallel(model, LINE, (x,), **arguments)
        except (InfeasibleError, ShardingError) as error:
            found.append(str(error))
    assert torch.isfinite(model(x))  # nothing was changed
    return found


def test_what_cannot_be_cut_is_named_on_all_ranks(ranks: RankPool) -> None:
    for reply in ranks.run(uncut, world=4):
        assert len(reply) == 4
        assert "statistics" in reply[0] and "needs the whole batch at once" in reply[0]
        assert "micro_batches=9" in reply[1] and "micro_batches is 0" in reply[2] and "2.0" in reply[3]


def last_batch(rank: int) -> list[float]:
    model, x = tokens()
    parallel(model, SQUARE, (x,), micro_batches=5)
    losses: list[float] = []
    for batch in (x, x[:3]):
        loss = model(batch)
        loss.backward()
        losses.append(float(full(loss)))
    return losses


@pytest.mark.slow
def test_a_last_smaller_batch_is_cut_into_fewer(ranks: RankPool) -> None:
    model, x = tokens()
    wanted = [float(model(x).detach()), float(model(x[:3]).detach())]
    for found in ranks.run(last_batch, world=4):
        assert_close(found, wanted, 1e-12)


def from_a_file(rank: int, data: dict[str, Any]) -> tuple[tuple[list[float], dict[str, Tensor]], str, str]:
    model, x = tokens()
    plan = Plan.from_json(data)
    other = ""
    try:
        parallel(model, LINE, (x,), plan=plan, micro_batches=2)
    except ShardingError as error:
        other = str(error)
    parallel(model, LINE, (x,), plan=plan)
    found = steps(model, x)
    try:
        report(model)
    except PlanError as error:
        return found, other, str(error)
    return found, other, "accepted"


@pytest.mark.slow
def test_a_plan_of_pieces_from_a_file(ranks: RankPool) -> None:
    model, x = tokens()
    mesh = MeshSpec(dict(LINE))
    plan = find_plan(model, mesh, (x,), profile=slow_compute(), backend="eager", micro_batches=5)
    wanted = steps(model, x)
    for found, other, measured in ranks.run(from_a_file, plan.to_json(), world=4):
        assert_close(found, wanted, 1e-12)
        assert "micro_batches is 2, and plan is of 5" in other
        assert "run in 5 pieces" in measured


def within(rank: int, limit: int) -> tuple[int, list[float]]:
    model, x = tokens(64)
    parallel(model, LINE, (x,), memory_limit=limit, recompute="user", micro_batches="auto")
    return model.autoshard_plan.micro_batches, steps(model, x)[0]


@pytest.mark.slow
def test_auto_within_a_limit(ranks: RankPool) -> None:
    model, x = tokens(64)
    mesh = MeshSpec(dict(LINE))
    plan = find_plan(model, mesh, (x,), profile=slow_compute(), backend="eager")
    wanted, _ = steps(model, x)
    for count, losses in ranks.run(within, int(0.6 * plan.peak_memory), world=4):
        assert count > 1
        assert_close(losses, wanted, 1e-12)
