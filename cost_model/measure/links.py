"""Link levels from measured collectives: they price the groups of other meshes, which were not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.curve import median
from cost_model.groups import Occupancy, group_ranks, occupancy
from cost_model.link_model import floor_slope, model_lines
from cost_model.measurements import CollectiveSamples, LinkLevel

PEAK_MARGIN = 2.0
"""A level's peak is this many times the best rate that was observed on it. A time that claims more was not measured on
the same machine."""

_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class Levels:
    """Names of the link levels, inner first, and the ranks that each joins (None: all)."""

    names: tuple[str, ...]
    ranks: tuple[int | None, ...]


def levels_of(hosts: Sequence[str]) -> Levels:
    """The levels of a world whose rank i runs on `hosts[i]`.

    There are two levels, inside and between hosts, if every host holds the same number of ranks, in a row. Else one
    level joins all.
    """
    count = len(set(hosts))
    if count == 1:
        return Levels(("inside the host",), (None,))
    each = len(hosts) // count
    blocks = [set(hosts[i : i + each]) for i in range(0, len(hosts), each)]
    aligned = len(hosts) == each * count and all(len(block) == 1 for block in blocks)
    if each == 1 or not aligned:
        return Levels(("between hosts",), (None,))
    return Levels(("inside a host", "between hosts"), (each, None))


def fit_links(levels: Levels, samples: Sequence[CollectiveSamples]) -> tuple[float, tuple[LinkLevel, ...]]:
    """(collective_launch_seconds, links) that come near the measured times by `cost_model.link_model`.

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
    launch, *latencies = (max(_LEAST_SECONDS, float(seconds)) for seconds in found)
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
