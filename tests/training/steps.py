"""What every rank runs: the same training as a single process, through `autoshard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import autoshard
from tests.models import seeded

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Run:
    """losses per step, and the final parameters, full."""

    losses: list[float]
    parameters: Mapping[str, Tensor]
    info: Mapping[str, Any] = field(default_factory=dict)


def train(
    model: nn.Module, call: Callable[[int], Tensor], steps: int, learning_rate: float = 1e-3
) -> list[float]:
    """AdamW with gradient clipping; `call(step)` returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses: list[float] = []
    for step in range(steps):
        loss = call(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def batches(inputs: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """`steps` batches like `inputs`: rolled along the batch, so that every step differs."""
    return [{name: value.roll(step, -1) for name, value in inputs.items()} for step in range(steps)]


def alone(name: str, steps: int, **kwargs: Any) -> Run:
    """The model trained in one process, with plain torch."""
    model, inputs = seeded(name, **kwargs)
    data = batches(inputs, steps)
    losses = train(model, lambda step: model(**data[step])["loss"], steps)
    return Run(losses, full(model))


def sharded(
    rank: int, name: str, axes: Axes, steps: int, options: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> Run:
    """The same through autoshard on this rank."""
    model, inputs = seeded(name, **kwargs)
    data = batches(inputs, steps)
    mesh = init_device_mesh("cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(a for a, _ in axes))
    autoshard(model, mesh, ((), data[0]), **options)
    losses = train(model, lambda step: model(**data[step])["loss"], steps)
    plan = model.autoshard_plan
    assert isinstance(rank, int) and dist.get_rank() == rank
    return Run(losses, full(model), {"collectives": len(plan.collectives), "summary": plan.explain()})
