"""A small model on two axes, pins under which prices decide how its plan is lowered, and such prices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, Plan, Profile, find_plan
from tests.profiles import slow_compute

__all__ = ["AXES", "PINS", "PROFILES", "bytes_cost_all", "planned", "regression", "rows", "starts_cost_all"]

AXES = (("a", 2), ("b", 2))


class Regression(nn.Module):
    """Three products and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.mix(torch.relu(self.up(x))))).square().mean()


def regression() -> Regression:
    torch.manual_seed(0)
    return Regression()


def rows() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def starts_cost_all() -> Profile:
    """Starting a collective costs so much that all that may share a bucket do, and few steps are better than cheap
    ones."""
    cpu = slow_compute()
    links = tuple(replace(link, latency_seconds=1e-3) for link in cpu.links)
    return replace(cpu, name="expensive starts", links=links)


def bytes_cost_all() -> Profile:
    """Starting is free, and a byte is expensive: nothing shares a bucket."""
    cpu = slow_compute()
    links = tuple(
        replace(link, latency_seconds=1e-12, bytes_per_second=link.bytes_per_second / 1e6)
        for link in cpu.links
    )
    return replace(cpu, name="expensive bytes", links=links, collective_launch_seconds=1e-12)


PROFILES: dict[str, Callable[[], Profile | None]] = {
    "none": lambda: None,
    "searched with": starts_cost_all,
    "another": bytes_cost_all,
}


ROWS, COLUMNS = [Shard(0), Shard(0)], [Shard(1), Shard(1)]
PINS: dict[str, dict[str, list[Shard]]] = {
    # Under the prices of bytes, one group over both axes, which the plan has no collective of.
    "other groups": {"up.weight": ROWS, "mix.weight": COLUMNS},
    # Under the prices of bytes, no two gradients share a bucket.
    "other buckets": {"up.weight": COLUMNS, "mix.weight": ROWS, "down.weight": [Shard(0), Shard(1)]},
}


def planned(pins: str) -> Plan:
    ends = {"profile": starts_cost_all(), "constraints": PINS[pins]}
    return find_plan(regression(), MeshSpec(dict(AXES)), (rows(),), **ends)
