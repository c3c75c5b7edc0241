"""A new kind of call runs op by op at first, and is compiled when it has come again."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime.executable import Programs
from tests.api.programs import data, full, parallel, two_linear
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("backend", "at_once", "wanted"),
    [
        ("inductor", True, ["inductor"] * 4),
        ("inductor", False, ["eager", "eager", "inductor", "inductor"]),
        ("eager", False, ["eager"] * 4),
    ],
)
def test_which_program_runs(backend: str, at_once: bool, wanted: list[str]) -> None:
    made: list[str] = []

    def make(by: str) -> str:
        made.append(by)
        return by

    programs = Programs(make, backend, at_once=at_once)  # type: ignore[arg-type]
    assert [programs.next() for _ in range(4)] == wanted
    assert made == list(dict.fromkeys(wanted))


def recurring(rank: int) -> list[list[torch.Tensor]]:
    """Losses and gradients of a second kind of call, four times. Two backwards follow two forwards, of another program
    in the second pair: gradients are doubled."""
    model = parallel(two_linear(), (("x", 2),), (data(8)[0],), backend="aot_eager")
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
