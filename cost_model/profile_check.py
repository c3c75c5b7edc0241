"""Do the values of a profile fit one another? The range of each is in `cost_model.measurements`.

Times never fall with size, and nothing is over the links' peak.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from cost_model.errors import ProfileError
from cost_model.groups import GroupShape, floor_slope, group_ranks, occupancy
from cost_model.measurements import (
    KERNEL_KINDS,
    CollectiveSamples,
    DeviceRates,
    Lateness,
    LinkLevel,
    MatmulRates,
)
from cost_model.mesh import MOST_DEVICES

_AGAIN = "measure again with more repetitions"
_NEWEST = "keep the newest"


def check_profile(
    where: str,
    links: Sequence[LinkLevel],
    collectives: Sequence[CollectiveSamples],
    device: DeviceRates,
    lateness: Lateness | None = None,
) -> None:
    """Raise ProfileError for the first impossible value; `where` starts the message.

    Each value must be in the range that the schema gives it.
    """
    check, seen = _Check(where), set[tuple[str, GroupShape]]()
    check.links(links)
    for i, samples in enumerate(collectives):
        check.samples(f"collectives[{i}]", samples, links)
        if (samples.kind, samples.group) in seen:
            check.refuse(f"collectives[{i}]", "repeats a kind and group", _NEWEST)
        seen.add((samples.kind, samples.group))
    for kind in KERNEL_KINDS:
        check.kernels(f"device.{kind}", device.rates(kind))
    mistake = None if lateness is None else lateness.mistake()
    if mistake is not None:
        check.refuse("lateness", mistake)


@dataclass(frozen=True)
class _Check:
    where: str

    def refuse(
        self, field: str, problem: str, remedy: str = "correct it, or measure the profile again"
    ) -> NoReturn:
        raise ProfileError(f"{self.where}: field {field} {problem}\n  try: {remedy}")

    def links(self, links: Sequence[LinkLevel]) -> None:
        inner = 1
        for i, link in enumerate(links):
            field = f"links[{i}]"
            self._under_peak(f"{field}.bytes_per_second", link.bytes_per_second, link)
            if link.reduced_bytes_per_second is not None:
                # An array that is summed on its way crosses each rank's port once in either direction.
                self._under_peak(f"{field}.reduced_bytes_per_second", link.reduced_bytes_per_second, link)
            inner = self._domain(field, link.ranks, inner, outermost=i == len(links) - 1)

    def _under_peak(self, field: str, rate: float, link: LinkLevel) -> None:
        if rate > link.peak_bytes_per_second:
            self.refuse(field, f"is {rate:.4g}, above the peak of {link.peak_bytes_per_second:.4g}")

    def _domain(self, field: str, ranks: int | None, inner: int, outermost: bool) -> int:
        if ranks is None:
            if not outermost:
                self.refuse(f"{field}.ranks", "is null; only the outermost level may join all ranks")
            return inner
        if ranks <= inner or ranks % inner:
            self.refuse(f"{field}.ranks", f"is {ranks}; it must be a multiple of {inner} above it")
        return ranks

    def samples(self, field: str, samples: CollectiveSamples, links: Sequence[LinkLevel]) -> None:
        self._group(f"{field}.group", samples.group)
        sizes, times = samples.nbytes, samples.seconds
        if len(times) != len(sizes):
            self.refuse(
                field, f"has {len(sizes)} sizes and {len(times)} times; it needs a time for each size"
            )
        self._increasing(f"{field}.nbytes", sizes)
        for i, (before, now) in enumerate(itertools.pairwise(times), start=1):
            if now < before:
                self.refuse(
                    f"{field}.seconds[{i}]", f"is {now:.4g}, less than {before:.4g} for fewer bytes", _AGAIN
                )
        self._spread(field, samples.spread, len(sizes))
        self._possible(field, samples, links)

    def _group(self, field: str, group: GroupShape) -> None:
        """The canonical form that `group_shape` gives: no size 1, large strides first, nothing to merge."""
        if math.prod(ranks for ranks, _ in group) > MOST_DEVICES:
            self.refuse(field, f"spans more than {MOST_DEVICES} ranks")
        for (_, outer), (ranks, inner) in itertools.pairwise(group):
            if outer <= ranks * inner:
                self.refuse(
                    field, f"is {group}; list large strides first, with each stride above what the next spans"
                )

    def _possible(self, field: str, samples: CollectiveSamples, links: Sequence[LinkLevel]) -> None:
        ranks = group_ranks(samples.group)
        slope = floor_slope(samples.kind, occupancy(ranks, [link.ranks for link in links]), links)
        for i, (nbytes, seconds) in enumerate(zip(samples.nbytes, samples.seconds, strict=True)):
            if seconds < slope * nbytes:
                self.refuse(
                    f"{field}.seconds[{i}]",
                    f"is {seconds:.4g} for {nbytes} bytes; at the peak rate of the links, "
                    f"{samples.kind} over {len(ranks)} ranks takes at least {slope * nbytes:.4g}",
                    "check the unit of the times (seconds) and of the sizes (bytes), and links[].ranks",
                )

    def _spread(self, field: str, spread: Sequence[float], count: int) -> None:
        if len(spread) not in (0, count):
            self.refuse(
                f"{field}.spread", f"has {len(spread)} values for {count} sizes; give one each, or none"
            )

    def _increasing(self, field: str, values: Sequence[float]) -> None:
        for i, (before, now) in enumerate(itertools.pairwise(values), start=1):
            if now <= before:
                self.refuse(f"{field}[{i}]", f"is {now:.4g}, not above {before:.4g} before it")

    def kernels(self, field: str, kernels: Sequence[MatmulRates]) -> None:
        dtypes = [rates.dtype for rates in kernels]
        for i, rates in enumerate(kernels):
            if rates.dtype in dtypes[:i]:
                self.refuse(f"{field}[{i}].dtype", f"repeats {rates.dtype}", _NEWEST)
            self._rates(f"{field}[{i}]", rates)

    def _rates(self, field: str, rates: MatmulRates) -> None:
        if len(rates.flops) != len(rates.flops_per_second):
            self.refuse(field, "must have a rate for each size")
        self._increasing(f"{field}.flops", rates.flops)
        self._spread(field, rates.spread, len(rates.flops))
        times = [size / rate for size, rate in zip(rates.flops, rates.flops_per_second, strict=True)]
        for i, (before, now) in enumerate(itertools.pairwise(times), start=1):
            # Times that were equal differ in the last digit once they are kept as rates.
            if now < before * (1.0 - 1e-9):
                self.refuse(
                    f"{field}.flops_per_second[{i}]",
                    "makes a larger product faster than a smaller one",
                    _AGAIN,
                )
