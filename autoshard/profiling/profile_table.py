"""A profile's measurements, and a check of them, as tables. Columns as nccl-tests prints them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from cost_model.groups import GroupShape, shape_text
from cost_model.measure.recheck import CheckedPoint
from cost_model.measurements import CollectiveSamples, DeviceRates
from cost_model.profile import Profile
from cost_model.readers.points import busbw_factor

__all__ = ["check_table", "collective_table", "profile_table"]


def profile_table(profile: Profile, axes: Mapping[GroupShape, Sequence[str]]) -> str:
    """Per collective and group: size, time, algbw = size / time, busbw = algbw times the factor that makes
    it comparable with the links, spread. Then the device's rates.   [nccl-tests doc/PERFORMANCE.md]

    axes: names for the groups that have them.
    """
    return (
        "\n".join([collective_table(profile, axes), *_device(profile.device), "", profile.summary()]) + "\n"
    )


def collective_table(profile: Profile, axes: Mapping[GroupShape, Sequence[str]]) -> str:
    """The part of `profile_table` about collectives."""
    lines = ["                      size        time     algbw     busbw   spread"]
    lines += ["                     bytes          us      GB/s      GB/s        %"]
    for samples in profile.collectives:
        lines += _collective(samples, axes.get(samples.group, ()))
    return "\n".join(lines)


def _collective(samples: CollectiveSamples, axes: Sequence[str]) -> Iterator[str]:
    over = f"{'+'.join(axes)}: " if axes else ""
    yield f"{samples.kind} over {over}{shape_text(samples.group)}"
    factor = busbw_factor(samples.kind, math.prod(ranks for ranks, _ in samples.group))
    for nbytes, seconds, spread in zip(
        samples.nbytes, samples.seconds, _spreads(samples.spread, len(samples.nbytes)), strict=True
    ):
        algbw = nbytes / seconds / 1e9
        yield f"{nbytes:26d}{seconds * 1e6:12.1f}{algbw:10.3f}{algbw * factor:10.3f}{spread:>9}"


def _device(device: DeviceRates) -> Iterator[str]:
    yield ""
    yield "                operations        time             GFLOP/s   spread"
    for rates in device.matmul:
        yield f"{rates.dtype} products"
        for flops, rate, spread in zip(
            rates.flops, rates.flops_per_second, _spreads(rates.spread, len(rates.flops)), strict=True
        ):
            yield f"{flops:26.0f}{flops / rate * 1e6:12.1f}{rate / 1e9:20.2f}{spread:>9}"


def _spreads(spread: Sequence[float], count: int) -> Sequence[str]:
    """Percent for each of `count` sizes; "-" if unknown."""
    return [f"{100 * share:.0f}" for share in spread] or ["-"] * count


def check_table(points: Sequence[CheckedPoint]) -> str:
    """Predicted against measured, point by point."""
    lines = [f"{'':30}{'size':>12}{'predicted':>12}{'measured':>12}{'ratio':>8}{'may be':>9}"]
    lines += [f"{'':42}{'us':>12}{'us':>12}"]
    for point in points:
        lines.append(
            f"{point.name:30}{point.size:12d}{point.predicted * 1e6:12.1f}{point.measured * 1e6:12.1f}"
            f"{point.measured / point.predicted:8.2f}{f'+-{point.tolerance:.0%}':>9}  "
            f"{'ok' if point.holds else 'OFF'}"
        )
    return "\n".join(lines) + "\n"
