"""Checks of the forward at each call of a parallel model: what comes out otherwise, is done otherwise or raised."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, PlanError, find_plan, verify
from autoshard.runtime.call_program import Checks, Otherwise
from passes.capture import capture
from tests.api.programs import Axes, assert_close, full, parallel
from tests.ranks import RankPool

LINE: Axes = (("dp", 2),)


class Checked(nn.Module):
    """A check that raises, a number that is only kept, a clamp that only a sick run needs, a branch with two sides, and
    running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.limit = 4
        self.log: list[float] = []
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= self.limit:
            raise ValueError(f"a label is not among {self.limit}")
        h = self.norm(self.first(x))
        self.log.append(h.abs().max().item())
        if torch.isinf(h).any():
            h = torch.nan_to_num(h, 0.0, 1.0, -1.0)
        logits = self.last(h) if (labels > 0).any() else 2 * self.last(h)
        return nn.functional.cross_entropy(logits, labels)


def calls() -> list[tuple[Tensor, Tensor]]:
    """Two usual ones, one for each other side, a label too large, and a usual one."""
    torch.manual_seed(1)
    x, labels = torch.randn(5, 8, 4), torch.arange(8) % 4
    x[2, 0, 0] = torch.inf
    found = [(x[0], labels), (x[1], 0 * labels), (x[2], labels), (x[3], labels + 1), (x[4], labels)]
    return [found[0], *found]


def trained(rank: int, axes: Axes | None) -> tuple[list[object], list[float], dict[str, Tensor]]:
    """(losses or errors, log, state at the end)"""
    model = Checked()
    if axes is not None:
        parallel(model, axes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[object] = []
    for x, labels in calls():
        optimizer.zero_grad()
        try:
            loss = model(x, labels)
        except ValueError as error:
            told.append(f"{type(error).__name__}: {error}")
            continue
        loss.backward()
        told.append(loss.nan_to_num(-1.0).item())
        if loss.isfinite():
            optimizer.step()
    return (
        told,
        [-1.0 if math.isnan(number) else number for number in model.log],
        full({**dict(model.named_parameters()), **dict(model.named_buffers())}),
    )


def test_a_call_does_what_its_values_say(ranks: RankPool) -> None:
    told, log, state = trained(0, None)
    assert told[4] == "ValueError: a label is not among 4"
    state = {name: value.nan_to_num() for name, value in state.items()}
    for got_told, got_log, got in ranks.run(trained, LINE, world=2):
        assert got_told[4] == told[4] and all(type(number) is float for number in got_log)
        assert_close(got_log, log)
        assert_close([got_told[:4], got_told[5:]], [told[:4], told[5:]])
        assert_close({name: value.nan_to_num() for name, value in got.items()}, state)


def test_answers_that_do_not_hold() -> None:
    """By hand: the outputs of the graph beside the loss and the kept number are the questions, in order."""
    x, labels = calls()[0]
    call = capture(Checked(), (x, labels), {}).call
    holds = [torch.tensor(0.0), torch.tensor(1.0), *map(torch.tensor, (False, False, True))]
    assert [index for index, _ in call.checks] == [2, None, 3, 4]
    Checks(call)(holds, later=False)()
    for place, count in ((2, 1), (4, 4)):
        outputs = [value if i != place else ~value for i, value in enumerate(holds)]
        with pytest.raises(Otherwise) as caught:
            Checks(call)(outputs, later=False)
        assert len(caught.value.answers.sure) == count and "test_checks.py" in caught.value.place


class Experts(nn.Module):
    """A loop over experts that skips those to which no row goes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros(len(x), 8)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]))
        return out.square().mean()


class Capacity(Experts):
    """Those of an expert that has too many take another way; and a loop that ends when it has come close enough."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros(len(x), 8)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            if len(rows) > 5:
                rows, dropped = rows[:5], rows[5:]
                out[dropped] = x[dropped].repeat(1, 2)
            out.index_add_(0, rows, expert(x[rows]))
        steps = 0
        while out.norm() > 2 and steps < 9:
            out, steps = out / 2, steps + 1
        return out.square().mean()


def routed(rank: int, axes: Axes | None, kind: type[Experts] = Experts) -> list[float]:
    model = kind()
    if axes is not None:
        parallel(model, axes)
    torch.manual_seed(1)
    x, optimizer, losses = torch.randn(8, 4), torch.optim.SGD(model.parameters(), lr=0.1), []
    for rows in (x, x[:1].expand(8, 4), x):  # to both, to one, to both
        optimizer.zero_grad()
        loss = model(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_branches_on_what_is_computed_go_as_they_do_in_one_process(ranks: RankPool) -> None:
    for losses in ranks.run(routed, LINE, Capacity, world=2):
        assert_close(losses, routed(0, None, Capacity))


class Draws(nn.Module):
    """A branch on a number that is drawn; without it the same numbers."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.linear, self.branches = nn.Linear(4, 4), branches

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(())
        side = (
            (torch.ones(()) if drawn < 0.5 else torch.zeros(())) if self.branches else (drawn < 0.5).float()
        )
        return drawn + 0 * self.linear(x).sum(), side


def drawn(rank: int, axes: Axes, branches: bool) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = Draws(branches)
    parallel(model, axes)
    return [(float(number), float(side)) for number, side in (model(torch.randn(4, 4)) for _ in range(12))]


def test_a_branch_on_what_is_drawn_does_not_change_what_is_drawn(ranks: RankPool) -> None:
    plain, branching = (ranks.run(drawn, LINE, branches, world=2) for branches in (False, True))
    assert plain == branching and plain[0] == plain[1]
    assert {side for _, side in plain[0]} == {0.0, 1.0}


def test_experts_without_rows_are_skipped(ranks: RankPool) -> None:
    for losses in ranks.run(routed, LINE, world=2):
        assert_close(losses, routed(0, None))
    ((_, first), (_, second)) = capture(Experts(), (torch.randn(8, 4),), {}).call.checks
    assert first.error is second.error is None and not (first.answer or second.answer)


class Sides(nn.Module):
    """Two branches one after the other, of which a search guesses neither."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x.sin() if x.sum() > 0 else x.cos()
        return x.exp() if x[0, 0].item() > 0.9 else x.tanh()


def test_a_plan_is_of_the_sides_that_its_example_inputs_take() -> None:
    torch.manual_seed(0)
    model = Sides()
    inputs = [torch.full((2, 4), number, dtype=torch.float64) for number in (-3.0, -0.3, 0.3, 3.0)]
    plans = [find_plan(model, MeshSpec({"x": 2}), x) for x in inputs]
    assert len({plan.origin.graph_hash for plan in plans}) > 1
    for plan, x in zip(plans, inputs, strict=True):
        assert verify(model, plan, x).ok
    with pytest.raises(PlanError) as refused:
        for x in inputs:
            verify(model, plans[0], x)
    assert "a plan goes one way, that of find_plan's example inputs, at " in refused.value.__notes__[0]
