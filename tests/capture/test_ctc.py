"""`F.ctc_loss` as an op of fixed shape: padded targets, targets in a row, and those that a mask chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import check
from tests.rules.registered import check as check_rule

Rest = Callable[[Tensor, Tensor, Tensor], Any]
LABELS = torch.tensor([[1, -1, 3, 3], [2, 2, -1, -1], [4, -1, -1, -1], [-1, -1, -1, -1]])
STEPS = torch.tensor([7, 5, 1, 3])


class Speech(nn.Module):
    """A linear, then a loss of (log-probabilities [t, n, c], labels [n, s] with gaps, lengths)."""

    def __init__(self, rest: Rest) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.rest = rest

    def forward(self, x: Tensor, labels: Tensor, steps: Tensor) -> Any:
        return self.rest(self.linear(x).log_softmax(-1).transpose(0, 1), labels, steps)


def padded(p: Tensor, y: Tensor, steps: Tensor) -> Any:
    return F.ctc_loss(p, y.abs(), steps, steps.clamp(max=3), reduction="sum", zero_infinity=True)


def chosen(p: Tensor, y: Tensor, steps: Tensor) -> Any:
    """As transformers' ForCTCLoss has it."""
    keep = (y != -1) & (y != 0)
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(p, y.masked_select(keep), steps, keep.sum(-1), reduction="none")


def chosen_with_other_lengths(p: Tensor, y: Tensor, steps: Tensor) -> Any:
    return F.ctc_loss(p, y[y > 0], steps, torch.where(y > 0, 1, 0).sum(1), blank=0)


def in_a_row(p: Tensor, y: Tensor, steps: Tensor) -> Any:
    row = y.flatten()[torch.tensor([0, 2, 3, 4, 5, 8])]
    infinite = F.ctc_loss(p, row, (1, 1, 1, 1), (3, 2, 1, 0), zero_infinity=True)  # type: ignore[arg-type]  # pyright: ignore
    return infinite + nn.CTCLoss(blank=0)(p, row, steps, torch.tensor([3, 2, 1, 0]))


def of_one(p: Tensor, y: Tensor, steps: Tensor) -> Any:
    each = F.ctc_loss(p[:, 0], y[0].abs(), steps[:1], torch.tensor(4), reduction="none")
    return (
        each
        + F.ctc_loss(p[:, 3], y[3, :0], steps[0], steps[0] * 0)
        + torch.ctc_loss(p, y.abs(), steps, steps * 0, 0, 2)
    )


def under_autocast(p: Tensor, y: Tensor, steps: Tensor) -> Any:
    """Computed in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        return padded(p.bfloat16(), y, steps)


def call() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 7, 3, dtype=torch.float64), LABELS, STEPS


@pytest.mark.parametrize(
    "rest",
    [padded, chosen, chosen_with_other_lengths, in_a_row, of_one, under_autocast],
    ids=lambda rest: rest.__name__,
)
def test_values_and_gradients_are_torchs(rest: Rest) -> None:
    torch.manual_seed(0)
    captured = check(Speech(rest).double(), *call(), rtol=1e-12, atol=1e-12)
    assert bool(captured.call.checks) == (rest in (chosen_with_other_lengths, in_a_row))


def test_plans_split_the_sequences() -> None:
    model, given = Speech(chosen).double(), call()
    plan = find_plan(model, MeshSpec({"x": 2}), given, profile="cpu", refine="off", backend="eager")
    assert verify(model, plan, given).ok and not plan.fallbacks
    probs, lengths = torch.randn(7, 4, 5, dtype=torch.float64).log_softmax(-1), torch.tensor([3, 2, 1, 0])
    args = (probs, LABELS.abs(), STEPS, lengths, 0, True)
    assert check_rule(torch.ops.autoshard.ctc_loss.default, *args).splittable == ("n",)
    grad = torch.rand(4, dtype=torch.float64)
    assert check_rule(torch.ops.autoshard.ctc_loss_backward.default, grad, *args).splittable == ("n",)


def test_lengths_that_do_not_fit_are_an_error_at_every_call() -> None:
    with pytest.raises(CaptureError, match="do not add up") as caught:
        capture(Speech(lambda p, y, steps: F.ctc_loss(p, y[y > 0], steps, steps)), call(), {})
    assert "test_ctc.py" in str(caught.value)
