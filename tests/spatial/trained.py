"""What every process of `tests.spatial.whole` runs: ten steps of a whole model, and how far two runs lie apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from autoshard import autoshard
from tests.spatial.networks import NETWORKS, network
from tests.training.steps import full

__all__ = ["AXES", "MODELS", "STEPS", "Errors", "Trained", "alone", "compared", "on_rank", "seeded"]

STEPS = 10
AXES = ("a", "b")
MODELS = ("resnet-50", *NETWORKS)


class ResNet50(nn.Module):
    """Hugging Face's ResNet-50 at full size (bottlenecks 3-4-6-3, widths 64 .. 2048), random weights."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        self.resnet = ResNetForImageClassification(ResNetConfig.from_dict({"num_labels": 10}))

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.arange(x.shape[0], device=x.device) % 10
        return F.cross_entropy(self.resnet(x).logits, labels, label_smoothing=0.1)


def seeded(name: str, batch: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """The model, its weights the same in every process, and a global batch."""
    if name != "resnet-50":
        return network(name, batch, dtype)
    torch.manual_seed(0)
    return ResNet50().to(dtype), torch.randn(batch, 3, 97, 101, dtype=dtype)


@dataclass(frozen=True)
class Trained:
    """losses: of every step. start, end: parameters and buffers before and after, full."""

    losses: Sequence[float]
    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    seconds: float


@dataclass(frozen=True)
class Errors:
    """losses: largest relative difference over the steps. parameters, buffers: of any tensor, the largest difference
    over the largest way that the training moved an element of it. worst: the tensor."""

    losses: float
    parameters: float
    buffers: float
    worst: str


def _state(model: nn.Module) -> dict[str, Tensor]:
    buffers = {n: getattr(b, "full_tensor", lambda b=b: b)().clone() for n, b in model.named_buffers()}
    return {**full(model), **buffers}


def _train(model: nn.Module, x: Tensor, optimizer: str, rate: float) -> Trained:
    """x: global. The batch rolls along its last dim, so that every step differs."""
    made = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    update = made(model.parameters(), lr=rate)
    start, losses = _state(model), []
    began = time.perf_counter()
    for step in range(STEPS):
        loss = model(x.roll(step, -1))
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return Trained(losses, start, _state(model), time.perf_counter() - began)


def alone(
    name: str, batch: int, dtype: torch.dtype, optimizer: str, rate: float, *, nudge: float = 0.0
) -> Trained:
    """In one process, with plain torch. nudge: relative change of every weight, up or down, before the first step."""
    model, x = seeded(name, batch, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + nudge * signs.to(dtype))
    return _train(model, x, optimizer, rate)


def on_rank(
    rank: int,
    name: str,
    batch: int,
    dtype: torch.dtype,
    optimizer: str,
    rate: float,
    sizes: tuple[int, ...],
    options: Mapping[str, Any],
    wanted: str,
) -> tuple[Errors, float]:
    """The same through autoshard, against the `Trained` in the file `wanted`; seconds of the steps."""
    model, x = seeded(name, batch, dtype)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])
    autoshard(model, mesh, (x,), **options)
    run = _train(model, x, optimizer, rate)
    return compared(torch.load(wanted, weights_only=False), run), run.seconds


def compared(wanted: Trained, run: Trained) -> Errors:
    losses = max(abs(a - b) / abs(a) for a, b in zip(wanted.losses, run.losses, strict=True))
    errors = {name: _error(wanted, run, name) for name in wanted.end}
    is_buffer = {name: "running_" in name or name.endswith("tracked") for name in errors}
    parameters = {name: error for name, error in errors.items() if not is_buffer[name]}
    worst = max(parameters, key=lambda name: parameters[name])
    buffers = max((error for name, error in errors.items() if is_buffer[name]), default=0.0)
    return Errors(losses, parameters[worst], buffers, worst)


def _error(wanted: Trained, run: Trained, name: str) -> float:
    before, after = (values[name].double() for values in (wanted.start, wanted.end))
    moved = float((after - before).abs().max())
    return float((run.end[name].double() - after).abs().max()) / (moved or 1.0)
