"""`verify` raises no false alarm where rounding decides, and still finds what is wrong there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from tests.api.forged import forgotten_sum
from tests.api.programs import data, two_linear
from tests.profiles import slow_compute


class Vanishing(nn.Module):
    """The last norm sends back no gradient along its input's own direction: what arrives before it is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 64)
        self.first, self.last = nn.LayerNorm(64), nn.LayerNorm(64, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(1e3 * self.first(self.up(x) * 1e-3)).square().sum()


class BeforeNorm(nn.Module):
    """The gradient of the convolution's bias cancels over all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 10, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=1) * self.weight


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[torch.randperm(8)]


class Quantized(nn.Module):
    """Weights stored in 8 bits, and activations that are rounded to 8."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 6)
        self.register_buffer("weight", torch.randn(6, 4).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x).to(torch.float8_e4m3fn)
        return h.float() @ self.weight.float(), h.detach()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vanishing gradient": (Vanishing, (8, 10)),
    "cancelled gradient": (BeforeNorm, (2, 1, 128, 128)),
    "complex": (Complex, (8, 10)),
    "permutation": (Shuffled, (8, 10)),
    "float8": (Quantized, (8, 10)),
}


@pytest.mark.parametrize("name", CASES)
def test_no_false_alarm(name: str) -> None:
    build, shape = CASES[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    plan = find_plan(model, MeshSpec({"x": 2}), (x,), profile=slow_compute(), backend="eager")
    report = verify(model, plan, (x,))
    assert report.ok, str(report)


def test_no_false_alarm_under_autocast() -> None:
    model, x = two_linear(), data()[0]
    options: dict[str, Any] = {"profile": slow_compute(), "backend": "eager", "autocast": torch.bfloat16}
    plan = find_plan(model, MeshSpec({"x": 2}), (x,), **options)
    assert verify(model, plan, (x,), autocast=torch.bfloat16).ok


def test_a_dropped_reduction_is_found_beside_a_cancelled_gradient() -> None:
    """Each pending sum of the plan, forgotten one by one, is found or changes nothing that is compared."""
    torch.manual_seed(0)
    model, x = Vanishing(), torch.randn(8, 10)
    plan = find_plan(model, MeshSpec({"x": 2}), (x,), profile=slow_compute(), backend="eager")
    pending = [
        (r.name, i) for r in plan.records for i, result in enumerate(r.results) if result.layout.partial
    ]
    assert pending
    for name, index in pending:
        assert not verify(model, forgotten_sum(model, plan, (x,), name, index), (x,)).ok, name
