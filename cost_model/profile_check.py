"""Is a profile possible? Finite positive numbers, times that never fall with size, nothing over the peak."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NoReturn

from cost_model.errors import ProfileError
from cost_model.groups import GroupShape, group_ranks, occupancy
from cost_model.link_model import floor_slope
from cost_model.measurements import (
    KERNEL_KINDS,
    KINDS,
    CollectiveSamples,
    DeviceRates,
    LinkLevel,
    MatmulRates,
)

__all__ = ["check_profile"]

_SMALLEST, _LARGEST = 1e-30, 1e30
_MOST_RANKS = 2**20

_REMEDY = "correct it, or measure the profile again"


def check_profile(
    where: str,
    collective_launch_seconds: float,
    overlap_efficiency: float,
    links: Sequence[LinkLevel],
    collectives: Sequence[CollectiveSamples],
    device: DeviceRates,
) -> None:
    """Raise ProfileError for the first impossible value; `where` starts the message."""
    check = _Check(where)
    check.share("overlap_efficiency", overlap_efficiency)
    check.run(collective_launch_seconds, links, collectives, device)


class _Check:
    def __init__(self, where: str) -> None:
        self._where = where

    def run(
        self,
        launch: float,
        links: Sequence[LinkLevel],
        collectives: Sequence[CollectiveSamples],
        device: DeviceRates,
    ) -> None:
        self._positive("collective_launch_seconds", launch)
        self._links(links)
        seen: set[tuple[str, GroupShape]] = set()
        for i, samples in enumerate(collectives):
            self._samples(f"collectives[{i}]", samples, links)
            if (samples.kind, samples.group) in seen:
                self._refuse(f"collectives[{i}]", "repeats a kind and group", "keep the newest")
            seen.add((samples.kind, samples.group))
        self._device(device)

    def share(self, field: str, value: float) -> None:
        """In [0, 1]; NaN is not."""
        if not 0.0 <= value <= 1.0:
            self._refuse(field, f"is {value!r}; it must be between 0 and 1")

    def _refuse(self, field: str, problem: str, remedy: str = _REMEDY) -> NoReturn:
        raise ProfileError(f"{self._where}: field {field} {problem}\n  try: {remedy}")

    def _positive(self, field: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            self._refuse(field, f"is {value!r}; it must be finite and above zero")
        if not _SMALLEST < value < _LARGEST:
            self._refuse(field, f"is {value:.3g}, which nothing in a computer is")

    def _links(self, links: Sequence[LinkLevel]) -> None:
        if not links:
            self._refuse("links", "is empty", "state at least one level, the network that joins all ranks")
        inner = 1
        for i, link in enumerate(links):
            field = f"links[{i}]"
            self._positive(f"{field}.latency_seconds", link.latency_seconds)
            self._positive(f"{field}.bytes_per_second", link.bytes_per_second)
            self._positive(f"{field}.peak_bytes_per_second", link.peak_bytes_per_second)
            if link.bytes_per_second > link.peak_bytes_per_second:
                self._refuse(
                    f"{field}.bytes_per_second",
                    f"is {link.bytes_per_second:.4g}, above the peak of {link.peak_bytes_per_second:.4g}",
                )
            self._reduced(f"{field}.reduced_bytes_per_second", link)
            inner = self._domain(field, link.ranks, inner, outermost=i == len(links) - 1)

    def _reduced(self, field: str, link: LinkLevel) -> None:
        """An array summed on its way crosses each rank's port once in either direction."""
        rate, peak = link.reduced_bytes_per_second, link.peak_bytes_per_second
        if rate is not None:
            self._positive(field, rate)
            if rate > peak:
                self._refuse(field, f"is {rate:.4g}, above the peak of {peak:.4g}")

    def _domain(self, field: str, ranks: int | None, inner: int, outermost: bool) -> int:
        if ranks is None:
            if not outermost:
                self._refuse(f"{field}.ranks", "is null; only the outermost level may join all ranks")
            return inner
        if ranks <= inner or ranks % inner:
            self._refuse(f"{field}.ranks", f"is {ranks}; it must be a multiple of {inner} above it")
        return ranks

    def _samples(self, field: str, samples: CollectiveSamples, links: Sequence[LinkLevel]) -> None:
        if samples.kind not in KINDS:
            self._refuse(f"{field}.kind", f"is {samples.kind!r}; it must be one of {', '.join(KINDS)}")
        self._group(f"{field}.group", samples.group)
        sizes, times = samples.nbytes, samples.seconds
        if len(sizes) < 2 or len(times) != len(sizes):
            self._refuse(field, f"has {len(sizes)} sizes and {len(times)} times; it needs two or more pairs")
        self._increasing(f"{field}.nbytes", sizes)
        for i, seconds in enumerate(times):
            self._positive(f"{field}.seconds[{i}]", seconds)
        for i in range(1, len(times)):
            if times[i] < times[i - 1]:
                self._refuse(
                    f"{field}.seconds[{i}]",
                    f"is {times[i]:.4g}, less than {times[i - 1]:.4g} for fewer bytes",
                    "measure again with more repetitions",
                )
        self._spread(field, samples.spread, len(sizes))
        self._possible(field, samples, links)

    def _group(self, field: str, group: GroupShape) -> None:
        """The canonical form that `group_shape` gives: no size 1, large strides first, nothing to merge."""
        if math.prod(ranks for ranks, _ in group) > _MOST_RANKS or any(
            stride > _MOST_RANKS for _, stride in group
        ):
            self._refuse(field, f"spans more than {_MOST_RANKS} ranks")
        if not group or any(ranks < 2 or stride < 1 for ranks, stride in group):
            self._refuse(field, f"is {group}; it must list pairs [ranks >= 2, stride >= 1]")
        for (_, outer), (ranks, inner) in itertools.pairwise(group):
            if outer <= ranks * inner:
                self._refuse(
                    field, f"is {group}; list large strides first, with each stride above what the next spans"
                )

    def _possible(self, field: str, samples: CollectiveSamples, links: Sequence[LinkLevel]) -> None:
        ranks = group_ranks(samples.group)
        slope = floor_slope(samples.kind, occupancy(ranks, [link.ranks for link in links]), links)
        for i, (nbytes, seconds) in enumerate(zip(samples.nbytes, samples.seconds, strict=True)):
            if seconds < slope * nbytes:
                self._refuse(
                    f"{field}.seconds[{i}]",
                    f"is {seconds:.4g} for {nbytes} bytes; at the peak rate of the links, "
                    f"{samples.kind} over {len(ranks)} ranks takes at least {slope * nbytes:.4g}",
                    "check the unit of the times (seconds) and of the sizes (bytes), and links[].ranks",
                )

    def _spread(self, field: str, spread: Sequence[float], count: int) -> None:
        if len(spread) not in (0, count):
            self._refuse(
                f"{field}.spread", f"has {len(spread)} values for {count} sizes; give one each, or none"
            )
        for i, value in enumerate(spread):
            if not (math.isfinite(value) and value >= 0):
                self._refuse(f"{field}.spread[{i}]", f"is {value!r}; it must be finite and not negative")

    def _increasing(self, field: str, values: Sequence[float]) -> None:
        for i, value in enumerate(values):
            self._positive(f"{field}[{i}]", value)
            if i and value <= values[i - 1]:
                self._refuse(f"{field}[{i}]", f"is {value:.4g}, not above {values[i - 1]:.4g} before it")

    def _device(self, device: DeviceRates) -> None:
        self._positive("device.launch_seconds", device.launch_seconds)
        self._positive("device.memory_bytes_per_second", device.memory_bytes_per_second)
        if not device.matmul:
            self._refuse("device.matmul", "is empty", "state the matrix-product rate of at least one dtype")
        for kind in KERNEL_KINDS:
            kernels = device.rates(kind)
            dtypes = [rates.dtype for rates in kernels]
            for i, rates in enumerate(kernels):
                if rates.dtype in dtypes[:i]:
                    self._refuse(f"device.{kind}[{i}].dtype", f"repeats {rates.dtype}", "keep the newest")
                self._matmul(f"device.{kind}[{i}]", rates)
        if device.update is not None:
            self._positive("device.update.launch_seconds", device.update.launch_seconds)
            self._positive("device.update.bytes_per_second", device.update.bytes_per_second)

    def _matmul(self, field: str, rates: MatmulRates) -> None:
        if not rates.flops or len(rates.flops) != len(rates.flops_per_second):
            self._refuse(field, "must have one or more sizes and a rate for each")
        self._increasing(f"{field}.flops", rates.flops)
        self._spread(field, rates.spread, len(rates.flops))
        for i, rate in enumerate(rates.flops_per_second):
            self._positive(f"{field}.flops_per_second[{i}]", rate)
        times = [size / rate for size, rate in zip(rates.flops, rates.flops_per_second, strict=True)]
        for i in range(1, len(times)):
            # Times that were equal differ in the last digit once they are kept as rates.
            if times[i] < times[i - 1] * (1.0 - 1e-9):
                self._refuse(
                    f"{field}.flops_per_second[{i}]",
                    "makes a larger product faster than a smaller one",
                    "measure again with more repetitions",
                )
