"""A new kind of call runs op by op at first, and is compiled when it has come again."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime.executable import MadeAhead, Running
from tests.api.programs import data, full, parallel, two_linear
from tests.ranks import RankPool


@pytest.mark.parametrize("compiled", [True, False])
def test_which_program_runs(compiled: bool) -> None:
    made: list[str] = []
    running = Running(*[None] * 2, "eager", None)  # type: ignore[arg-type]

    def make() -> str:
        made.append("inductor")
        return "inductor"

    programs = MadeAhead(running, make if compiled else None)  # type: ignore[arg-type]
    wanted = ["eager", "eager", *(["inductor"] * 2 if compiled else ["eager"] * 2)]
    assert [programs.next().program for _ in range(4)] == wanted
    assert made == ["inductor"] * compiled


def recurring(rank: int) -> list[list[torch.Tensor]]:
    """Losses and gradients of a second kind of call, four times. Two backwards follow two forwards, of another program
    in the second pair: gradients are doubled."""
    model = parallel(two_linear(), (("x", 2),), (data(8)[0],), backend="aot_eager", tune="first")
    found: list[list[torch.Tensor]] = []
    pending = []
    for _ in range(4):
        model.zero_grad()
        loss = model(data(6)[0]).square().mean()
        pending.append(loss)
        if len(pending) == 2:
            for one in pending:
                one.backward()
            pending.clear()
        found.append([full(loss), *(full(p.grad) for p in model.parameters() if p.grad is not None)])
    return found


def test_a_recurring_shape_stays_right_when_it_is_compiled(ranks: RankPool) -> None:
    alone, x = two_linear(), data(6)[0]
    loss = alone(x).square().mean()
    loss.backward()
    wanted = [p.grad for p in alone.parameters()]
    for found in ranks.run(recurring, world=2):
        for step in found:
            torch.testing.assert_close(step[0], loss.detach())
        for step in (found[1], found[3]):
            for got, gradient in zip(step[1:], wanted, strict=True):
                torch.testing.assert_close(got, 2 * gradient)
