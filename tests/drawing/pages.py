"""Plans whose pages are tested."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from autoshard import MeshSpec, Plan, find_plan
from tests.profiles import slow_compute

HOSTILE = "</script><img src=x onerror=hacked=1>"


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Blocks(nn.Module):
    """Equal layers between two that differ, one of them with a name that no page may read as HTML."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(24, 32))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule(HOSTILE)(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@functools.cache
def planned(layers: int = 5, pieces: int = 1) -> Plan:
    mesh = MeshSpec({"dp": 2})
    return find_plan(
        Blocks(layers),
        mesh,
        (torch.zeros(16, 24),),
        profile=slow_compute(),
        backend="eager",
        micro_batches=pieces,
    )
