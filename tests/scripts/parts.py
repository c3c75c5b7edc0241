"""What the scripts share: small models, batches, a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Net", "batch", "gradients", "net", "state", "step", "train"]


class Net(nn.Module):
    """Two layers with a norm between them. Its loss is computed by the script."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, dtype=dtype)
        self.drop = nn.Dropout(0.0)
        self.down = nn.Linear(16, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


def net(dtype: torch.dtype = torch.float32) -> Net:
    """The same values in every process."""
    torch.manual_seed(1)
    return Net(dtype)


def batch(number: int = 0, rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x [rows, 6], y [rows, 4]: the same in every process."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(rows, 6, generator=generator), torch.randn(rows, 4, generator=generator)
    return x.to(dtype), y.to(dtype)


def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: Any, optimizer: Any, steps: int = 3, after: Callable[[], Any] = lambda: None) -> list[Any]:
    """Losses, and the parameters at the end. after: called behind every step."""
    losses: list[float] = []
    for number in range(steps):
        losses.append(step(model, optimizer, *batch(number)))
        after()
    return [losses, state(model)]


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.state_dict().items()}


def gradients(model: Any) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}
