"""A product that the model keeps out of autocast stays out of it, through every backend, and `verify` finds it so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import autoshard, find_plan, verify
from autoshard.planning import started_mesh
from cost_model.mesh import MeshSpec

TOLERANCE = 2e-2
"""Of bfloat16 around the float32 inside. Angles in bfloat16 would be off by up to 8, and their sines by anything."""


class Rotated(nn.Module):
    """Angles by a product in float32, as a rotary embedding has them, beside a layer in lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.frequencies = nn.Parameter(torch.linspace(0.1, 1.0, 8)[None])

    def forward(self, x: Tensor) -> Tensor:
        """x: float [positions, 8] -> a loss."""
        with torch.autocast("cpu", enabled=False):
            angles = torch.arange(float(len(x)))[:, None] @ self.frequencies
        return (self.up(x) * angles.sin()).float().square().mean()


def result(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x)
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)]  # type: ignore[list-item]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_angles_stay_in_float32(backend: str) -> None:
    torch.manual_seed(0)
    model, x = Rotated(), torch.randn(2048, 8)
    wanted = result(copy.deepcopy(model), x)
    with started_mesh(None, "cpu") as mesh:
        got = result(autoshard(copy.deepcopy(model), mesh, backend=backend), x)
    for value, expected in zip(got, wanted, strict=True):
        error = float((value - expected).abs().max())
        assert error <= TOLERANCE * float(expected.abs().max())


def test_verify_inside_autocast() -> None:
    torch.manual_seed(0)
    model, x = Rotated(), torch.randn(2048, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plan = find_plan(model, MeshSpec({"a": 3}), (x,), profile="cpu")
        report = verify(model, plan, (x,))
    assert report.ok, str(report)
