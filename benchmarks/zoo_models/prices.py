"""Prices by which it pays to split even tiny models."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autoshard import Profile

SLOWER, LIMIT = 100.0, 20.0
"""How much slower kernels are; seconds of a search."""


@cache
def prices() -> Profile:
    """The nominal CPU with kernels that are slower and a network that starts at once."""
    cpu = Profile.named("cpu")
    slower = lambda rate: replace(rate, flops_per_second=tuple(one / SLOWER for one in rate.flops_per_second))
    device = replace(
        cpu.device,
        launch_seconds=1e-9,
        memory_bytes_per_second=cpu.device.memory_bytes_per_second / SLOWER,
        matmul=tuple(map(slower, cpu.device.matmul)),
    )
    links = tuple(replace(link, latency_seconds=1e-6) for link in cpu.links)
    return replace(cpu, name="slow kernels", device=device, links=links, collective_launch_seconds=1e-6)
