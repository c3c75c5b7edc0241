"""Prices for tests: machines on which small models are worth splitting."""

from __future__ import annotations

from dataclasses import replace

from cost_model.profile import Profile


def waited_for(name: str) -> Profile:
    """A shipped profile on which no communication hides behind computing: plans are as in the textbooks."""
    return replace(Profile.named(name), name=f"{name}, all waited for", overlap_efficiency=0.0)


def slow_compute(factor: float = 1e4) -> Profile:
    """The nominal CPU with a fast network and kernels `factor` times slower, launched for free.

    On the real one every split of a model with a few thousand parameters costs more than it saves.
    """
    cpu = Profile.named("cpu")
    rates = tuple(
        replace(rate, flops_per_second=tuple(r / factor for r in rate.flops_per_second))
        for rate in cpu.device.matmul
    )
    device = replace(
        cpu.device,
        launch_seconds=1e-9,
        memory_bytes_per_second=cpu.device.memory_bytes_per_second / factor,
        matmul=rates,
    )
    links = tuple(replace(link, latency_seconds=1e-6) for link in cpu.links)
    return replace(
        cpu,
        name="slow compute",
        device=device,
        links=links,
        collective_launch_seconds=1e-6,
        sources=("a test",),
    )


def dear_start(seconds: float) -> Profile:
    """`slow_compute` on links of that latency: computing something twice may be cheaper than fetching it."""
    cpu = slow_compute()
    return replace(cpu, links=tuple(replace(link, latency_seconds=seconds) for link in cpu.links))
