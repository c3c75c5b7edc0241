"""`benchmarks.gpu_prediction`, on a CPU: its kernels are timed, both models run, and the line says what was seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning import started_mesh
from benchmarks import gpu_prediction
from benchmarks.gpu_prediction import MODELS, Compared, Workload, compared
from tests.profiles import slow_compute


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x)).square().mean()


def test_a_model_is_predicted_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TIMING_SECONDS", 2.0), ("WARMUP", 1), ("STEPS", 3)):
        monkeypatch.setattr(gpu_prediction, name, value)
    monkeypatch.setattr(gpu_prediction, "startup_profile", lambda mesh: slow_compute())
    with started_mesh(None, "cpu") as mesh:
        found = compared(mesh, Workload("a layer", Layer, lambda: (torch.randn(512, 64),)), torch.float32)
    assert found.kernels >= 2  # the product and its gradient
    assert min(found.modelled, found.predicted, found.measured, found.plain) > 0


def test_what_is_said_of_it() -> None:
    said = str(Compared(modelled=0.03, predicted=0.019, measured=0.02, plain=0.025, kernels=7))
    assert "predicted 19.00 ms by 7 timed kernels (30.00 ms by modelled ones)" in said
    assert "ratio 0.950; torch.compile 25.00 ms, ratio 0.800" in said


def test_the_models_of_the_figure_are_there() -> None:
    assert set(MODELS) == {"gpt", "llama", "resnet"}
    assert "GPTConfig" in MODELS["gpt"]().text
