"""A profile, and what was timed, as on a machine on which everything takes some times as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_model.lateness import Lateness
from cost_model.measurements import (
    KERNEL_KINDS,
    CollectiveSamples,
    DeviceRates,
    LinkLevel,
    MatmulRates,
    UpdateRates,
)
from cost_model.profile import Profile
from cost_model.timed import TimedPrices

__all__ = ["paced_device", "paced_profile", "paced_rates", "paced_times"]


def paced_profile(profile: Profile, pace: float) -> Profile:
    """`profile` with all seconds times `pace`, latencies, starts and peaks included: whatever is priced by it takes
    exactly that many times as long, so no plan is another for it."""
    assert pace > 0.0, pace
    if pace == 1.0:
        return profile
    return replace(
        profile,
        collective_launch_seconds=pace * profile.collective_launch_seconds,
        links=tuple(_link(link, pace) for link in profile.links),
        collectives=tuple(_samples(samples, pace) for samples in profile.collectives),
        device=paced_device(profile.device, pace),
        lateness=_lateness(profile.lateness, pace),
    )


def paced_times(timed: TimedPrices, pace: float) -> TimedPrices:
    """`timed`, kernels and collectives, with all seconds times `pace`."""
    collectives = tuple(replace(one, seconds=pace * one.seconds) for one in timed.collectives)
    return replace(timed.kernels_times(pace), collectives=collectives)


def _link(link: LinkLevel, pace: float) -> LinkLevel:
    reduced = link.reduced_bytes_per_second
    return replace(
        link,
        latency_seconds=pace * link.latency_seconds,
        bytes_per_second=link.bytes_per_second / pace,
        # Rounding makes no measured time one that the peak forbids.
        peak_bytes_per_second=link.peak_bytes_per_second / pace * (1.0 + 1e-9),
        reduced_bytes_per_second=None if reduced is None else reduced / pace,
    )


def _samples(samples: CollectiveSamples, pace: float) -> CollectiveSamples:
    return replace(samples, seconds=_times(samples.seconds, pace))


def paced_device(device: DeviceRates, pace: float) -> DeviceRates:
    """`device` with all seconds times `pace`: kernels and the update."""
    return replace(
        device,
        launch_seconds=pace * device.launch_seconds,
        memory_bytes_per_second=device.memory_bytes_per_second / pace,
        update=None if device.update is None else _update(device.update, pace),
        **{kind: tuple(paced_rates(rates, pace) for rates in device.rates(kind)) for kind in KERNEL_KINDS},
    )


def paced_rates(rates: MatmulRates, pace: float) -> MatmulRates:
    """`rates` of kernels that take `pace` times as long."""
    return replace(rates, flops_per_second=tuple(rate / pace for rate in rates.flops_per_second))


def _update(update: UpdateRates, pace: float) -> UpdateRates:
    return UpdateRates(pace * update.launch_seconds, update.bytes_per_second / pace)


def _lateness(lateness: Lateness | None, pace: float) -> Lateness | None:
    if lateness is None:
        return None
    behind, seconds = (_times(times, pace) for times in (lateness.computing_seconds, lateness.seconds))
    return replace(lateness, computing_seconds=behind, seconds=seconds)


def _times(values: Sequence[float], factor: float) -> tuple[float, ...]:
    return tuple(factor * value for value in values)
