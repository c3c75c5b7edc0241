"""Gradients of a convolution by one call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.compile.joined import check_joined


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().sum()


def test_one_call_for_each_convolution() -> None:
    assert check_joined(Convolved(), torch.randn(2, 2, 6, 6), tolerance=1e-4)["convolution_backward"] == 2


class Shared(nn.Module):
    """One convolution of two inputs: gradients of other operands."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x).relu()).square().sum()


def test_gradients_of_other_operands_stay_apart() -> None:
    assert check_joined(Shared(), torch.randn(2, 2, 6, 6), tolerance=1e-4)["convolution_backward"] == 2
