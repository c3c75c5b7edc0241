"""Link levels from measured collectives: they price the groups of other meshes, which were not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from cost_model.groups import Occupancy, floor_slope, group_ranks, model_lines, occupancy
from cost_model.measure.clock import Clock, Work
from cost_model.measure.collective_work import (
    IN_A_ROW_SECONDS,
    PRODUCTS,
    Buffers,
    Pause,
    collective_series,
    pause_series,
    whole_size,
)
from cost_model.measure.kernel_work import matmul_edge, matmul_flops, overlap_works
from cost_model.measure.peers import Team
from cost_model.measure.sampling import Bench, Series
from cost_model.measurements import CollectiveSamples, DeviceRates, Lateness, LinkLevel, median

PEAK_MARGIN = 2.0
"""A level's peak is this many times the best rate that was observed on it. A time that claims more was not measured on
the same machine."""


@dataclass(frozen=True)
class Levels:
    """Names of the link levels, inner first, and the ranks that each joins (None: all)."""

    names: tuple[str, ...]
    ranks: tuple[int | None, ...]


def fit_links(levels: Levels, samples: Sequence[CollectiveSamples]) -> tuple[float, tuple[LinkLevel, ...]]:
    """(collective_launch_seconds, links) that come near the measured times by `cost_model.groups`.

    Launch and latencies: least squares of the smallest sizes' times, relative to them, none negative.
    Bandwidths, level by level from inside: the median of what the groups that reach no further got
    between their smallest and largest size.   `samples` must not be empty.
    """
    fits = [_Fit(s, occupancy(group_ranks(s.group), levels.ranks)) for s in samples]
    launch, latencies = _latencies(fits, len(levels.ranks))
    rates = _rates(fits, len(levels.ranks))
    peaks = [max(rate, _best(fits, level)) * PEAK_MARGIN for level, rate in enumerate(rates)]
    links = zip(levels.names, levels.ranks, latencies, rates, peaks, strict=True)
    return launch, tuple(LinkLevel(*link) for link in links)


@dataclass(frozen=True)
class _Fit:
    samples: CollectiveSamples
    group: Occupancy

    @property
    def outermost(self) -> int:
        return self.group.uses[-1].level

    def hops(self, level: int, count: int) -> float:
        """How often the model counts this level's latency, in its quickest algorithm."""
        links = [_link(latency=float(i == level)) for i in range(count)]
        return min(line.alpha for line in model_lines(self.samples.kind, self.group, links, 0.0))

    def share(self, level: int, count: int) -> float:
        """Bytes over one port of this level per byte of the collective, in the model's best algorithm."""
        links = [_link(rate=1.0 if i == level else math.inf) for i in range(count)]
        return min(line.beta for line in model_lines(self.samples.kind, self.group, links, 0.0))

    @property
    def seconds_per_byte(self) -> float:
        """The slope between smallest and largest size, or that of the largest size alone where noise left no slope."""
        sizes, times = self.samples.nbytes, self.samples.seconds
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        return slope if slope > 0.0 else times[-1] / sizes[-1]


def _link(latency: float = 0.0, rate: float = math.inf, peak: float = math.inf) -> LinkLevel:
    return LinkLevel("", None, latency, rate, peak)


def _latencies(fits: Sequence[_Fit], count: int) -> tuple[float, list[float]]:
    times = np.array([fit.samples.seconds[0] for fit in fits])
    rows = np.array([[1.0, *(fit.hops(level, count) for level in range(count))] for fit in fits])
    from scipy.optimize import nnls

    found, _ = nnls(rows / times[:, None], np.ones(len(fits)))
    launch, *latencies = (max(1e-9, float(seconds)) for seconds in found)
    return launch, latencies


def _rates(fits: Sequence[_Fit], count: int) -> list[float]:
    """Bytes per second of each level. A level that no group ends at gets the rate of all groups."""
    rates: list[float] = []
    for level in range(count):
        ending = [fit for fit in fits if fit.outermost == level] or list(fits)
        seen = [fit.share(level, count) / fit.seconds_per_byte for fit in ending]
        rates.append(median([rate for rate in seen if rate > 0.0]))
    return rates


def _best(fits: Sequence[_Fit], level: int) -> float:
    """The highest rate that a measured time needs of this level, by `floor_slope`."""
    links = [_link(peak=1.0)] * (level + 1)
    needed = [0.0]
    for fit in fits:
        for use in (use for use in fit.group.uses if use.level == level):
            slope = floor_slope(fit.samples.kind, Occupancy(fit.group.ranks, (use,)), links)
            pairs = zip(fit.samples.nbytes, fit.samples.seconds, strict=True)
            needed += [slope * nbytes / seconds for nbytes, seconds in pairs]
    return max(needed)


_SHARED_NBYTES = 2**20
"""Size of the collective where ranks share cores: between a bucket of gradients and a small activation."""


def hidden_share(communication: float, compute: float, both: float) -> float:
    """The share of the shorter of two works that is hidden when they run at once, clamped to [0, 1].

    a, b, both: seconds of each alone and of both, with both = a + b - share * min(a, b).
    """
    share = (communication + compute - both) / min(communication, compute)
    return min(1.0, max(0.0, share))


def waiting_share(seconds: float, processor_seconds: float) -> float:
    """The share of a collective in which nobody computes for it, clamped to [0, 1].

    processor_seconds: of one rank's threads, times the ranks for each core.
    """
    return min(1.0, max(0.0, 1.0 - processor_seconds / seconds))


def overlap_efficiency(
    bench: Bench, collectives: Sequence[CollectiveSamples], rates: DeviceRates, seconds: float
) -> float:
    """Measured with an all-reduce over the largest group and about as long a run of float32 products; of the all-reduce
    alone where ranks share cores.

    0 for one rank, which has nothing to hide.
    """
    team = bench.largest
    if team is None:
        return 0.0
    shared = bench.of_kernels is not bench.clock
    if shared:
        series = _on_shared_cores(team, bench.of_kernels, bench.device)
    else:
        shape = next(shape for shape, one in bench.teams.items() if one is team)
        samples = next(s for s in collectives if (s.kind, s.group) == ("all_reduce", shape))
        series = _with_products(team, samples, rates, bench.device)
    found = [curve.seconds[0] for curve in bench.curves(series, seconds)]
    return waiting_share(*found) if shared else hidden_share(*found)


def _with_products(
    team: Team, samples: CollectiveSamples, rates: DeviceRates, device: torch.device
) -> list[Series]:
    """An all-reduce, about as long a run of products, and both at once."""
    middle = len(samples.nbytes) * 2 // 3
    nbytes, alone = samples.nbytes[middle], samples.seconds[middle]
    float32 = next(rate for rate in rates.matmul if rate.dtype == "float32")
    at = len(float32.flops) // 2
    edge = matmul_edge(float32.flops[at])
    products = max(1, round(alone * float32.flops_per_second[at] / matmul_flops(edge)))
    works = overlap_works(team, nbytes, edge, products, device)
    names = ("all_reduce alone", "products alone", "all_reduce behind products")
    return [_series(name, nbytes, work) for name, work in zip(names, works, strict=True)]


def _on_shared_cores(team: Team, of_kernels: Clock, device: torch.device) -> list[Series]:
    """An all-reduce by the clock, of which the slowest rank's counts, and its processor time, the median rank's as for
    kernels."""
    work, _, _ = overlap_works(team, _SHARED_NBYTES, 1, 0, device)
    alone = _series("all_reduce alone", _SHARED_NBYTES, work)
    working = replace(alone, name="processor time of an all_reduce", across=median, clock=of_kernels)
    return [alone, working]


def _series(name: str, nbytes: int, work: Work) -> Series:
    return Series(name, (nbytes,), lambda _: work, least=IN_A_ROW_SECONDS, ahead=True)


_TIMES = (1, 4, 16, 48)
"""Multiples of the products that collectives are timed behind: about 1, 4, 16 and 48 milliseconds of a core."""
_KIND, _NBYTES = "all_reduce", 2**12
"""The collective that ranks come late to: of little data, so that little else takes time."""


def measure_lateness(bench: Bench, seconds: float) -> Lateness | None:
    """How much longer a collective takes behind more computing than it is timed behind, over the largest group, in
    about `seconds`; None for one rank, for which nobody is late.

    Ranks that compute come to the next collective at different times, the longer they computed the more so, above all
    where they share cores. Four ranks on two cores, an all-reduce of 4 KiB: 1.4 to 1.7 ms behind a millisecond of
    products, 2 to 2.4 behind 4, 3.8 to 5.4 behind 16 and 8 to 10 behind 48; of 256 KiB as much longer.
    """
    team = bench.largest
    if team is None:
        return None
    buffers, nbytes = Buffers(bench.device), (whole_size(_NBYTES, team.size),)
    pauses = [Pause(bench.device, PRODUCTS * times) for times in _TIMES]
    alone = [pause_series(pause, bench.of_kernels) for pause in pauses]
    # Nobody is late behind a barrier: one call at a time, not 8 in a row, said 1.3 to 4.9 ms behind 22 ms.
    both = [
        collective_series(
            f"{_KIND} behind {pause.products} products", _KIND, team, nbytes, buffers, pause, calls=8
        )
        for pause in pauses
    ]
    curves = [curve.seconds[0] for curve in bench.curves([*alone, *both], seconds)]
    return lateness(curves[: len(_TIMES)], curves[len(_TIMES) :], team.size)


def lateness(computing: Sequence[float], both: Sequence[float], ranks: int) -> Lateness | None:
    """From seconds of computing alone, and with the collective of `ranks` behind it.

    Times that fall are noise: no rank is earlier behind more computing. None where computing took no longer.
    """
    first = both[0] - computing[0]
    late = accumulate((b - c - first for b, c in zip(both, computing, strict=True)), max)
    points: list[tuple[float, float]] = []
    for computed, seconds in zip(computing, late, strict=True):
        if not points or computed > points[-1][0]:
            points.append((computed, max(0.0, seconds)))
    if len(points) < 2 or points[0][0] <= 0.0:
        return None
    computing_seconds, seconds = zip(*points, strict=True)
    return Lateness(computing_seconds, seconds, ranks)
