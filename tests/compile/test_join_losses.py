"""Cross-entropy in torch's own kernels: where that is the same, and where it must not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compile.joined import check_joined

BACKWARD = ("_log_softmax_backward_data", "nll_loss_backward")


class Head(nn.Module):
    """options: of F.cross_entropy."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head = nn.Linear(6, 7)
        self.options = options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), **self.options).sum()


def batch(*lead: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(7, lead, generator=torch.Generator().manual_seed(0))
    y.view(-1)[1] = -100
    return torch.randn(*lead, 6), y


@pytest.mark.parametrize("lead", [(5,), (3, 4)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_one_kernel_each_way(lead: tuple[int, ...], reduction: str) -> None:
    ops = check_joined(Head(reduction=reduction), *batch(*lead))
    assert ops["_log_softmax"] == 1
    assert [ops[name] for name in BACKWARD] == [1, 1]
    assert ops["nll_loss_forward"] == 1
    assert ops["_to_copy"] == 0  # the number of targets comes from the kernel
    assert ops["exp"] == ops["amax"] == ops["eq"] == ops["gather"] == ops["neg"] == 0


def test_another_ignored_index_and_smoothing() -> None:
    """The gradient is no longer of picked logarithms alone where labels are smoothed."""
    x, y = batch(5)
    ops = check_joined(Head(ignore_index=3), x, y.clamp(0))
    assert ops["nll_loss_backward"] == ops["nll_loss_forward"] == 1
    ops = check_joined(Head(label_smoothing=0.1), x, y)
    assert ops["_log_softmax"] == ops["_log_softmax_backward_data"] == 1


class OneHot(nn.Module):
    """By hand, with an index that no kernel takes: it picks nothing."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(6)
        picked = torch.where(places == y.unsqueeze(-1), -1.0, 0.0)
        return (F.log_softmax(x * x, -1) * picked).sum()


def test_an_index_that_picks_nothing_stays() -> None:
    x = torch.randn(5, 6, requires_grad=True)
    ops = check_joined(OneHot(), x, torch.tensor([0, -1, 3, -1, 5]))
    assert (ops["_log_softmax"], ops["nll_loss_backward"]) == (1, 0)


class AlongRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (F.log_softmax(self.up(x), 0) ** 2).sum()


def test_along_another_dim() -> None:
    ops = check_joined(AlongRows(), torch.randn(4, 6))
    assert (ops["_log_softmax"], ops["_log_softmax_backward_data"]) == (1, 1)


def test_a_sum_of_exponentials_stays() -> None:
    """No softmax: nothing was subtracted, or something else."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            shifted = y - y.amin(-1, keepdim=True)
            return (shifted - shifted.exp().sum(-1, keepdim=True).log()).square().sum()

    assert check_joined(Other(), torch.randn(4, 6))["_log_softmax"] == 0
