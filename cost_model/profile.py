"""`Profile`: a record of prices, and the ways to get one: a file, a measurement, outputs of other benchmarks.

And a profile as that of another machine: everything slower, a link faster, or corrected by what steps really took.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from cost_model.collectives import CollectivePrices
from cost_model.groups import (
    GroupShape,
    floor_slope,
    group_ranks,
    group_shape,
    mesh_occupancies,
    model_lines,
    occupancy,
    shapes_of,
)
from cost_model.measurements import CollectiveSamples, LinkLevel, monotone, paced
from cost_model.mesh import MeshSpec
from cost_model.profile_record import ProfileRecord
from cost_model.readers import read_profile
from cost_model.timed import TimedCollective

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cost_model.measure.clock import Clock
    from cost_model.measure.kernel_work import Attend
    from cost_model.measure.sampling import Progress


def with_rates(link: LinkLevel, change: Callable[[float], float], **others: float) -> LinkLevel:
    """`link` with both of its rates changed so, and `others` of its fields."""
    reduced = link.reduced_bytes_per_second
    return replace(
        link,
        bytes_per_second=change(link.bytes_per_second),
        reduced_bytes_per_second=None if reduced is None else change(reduced),
        **others,  # type: ignore[arg-type]
    )


def scaled_link(profile: Profile, level: int, factor: float) -> Profile:
    """`profile` with every bandwidth of link level `level` times `factor`; latencies and starts stay.

    Of a measured collective, a + b(nbytes) seconds, the constant a stays (what its first two sizes come to at 0 bytes),
    and b is multiplied by what the link model says of the group: its seconds per byte with the new links over those
    with the old ones, so that a curve of other levels stays as it was. No time is below what the new peaks allow.
    """
    old = profile.links
    peak = old[level].peak_bytes_per_second * factor
    faster = with_rates(old[level], lambda rate: rate * factor, peak_bytes_per_second=peak)
    links = (*old[:level], faster, *old[level + 1 :])
    curves = tuple(_rescaled(samples, old, links) for samples in profile.collectives)
    name = f"{profile.name}, {old[level].name} x {factor:.3g}"
    return replace(profile, name=name, links=links, collectives=curves)


def _rescaled(
    samples: CollectiveSamples, old: Sequence[LinkLevel], new: Sequence[LinkLevel]
) -> CollectiveSamples:
    group = occupancy(group_ranks(samples.group), [link.ranks for link in old])
    before, after = (
        min(line.beta for line in model_lines(samples.kind, group, ls, 0.0)) for ls in (old, new)
    )
    if before == after:
        return samples
    floor = floor_slope(samples.kind, group, new)
    start = _start(samples)
    seconds = tuple(
        max(start + (time - start) * after / before, floor * nbytes)
        for nbytes, time in zip(samples.nbytes, samples.seconds, strict=True)
    )
    return replace(samples, seconds=seconds)


def _start(samples: CollectiveSamples) -> float:
    """Seconds at 0 bytes, not negative: the line through the two smallest sizes."""
    (n, m), (first, second) = samples.nbytes[:2], samples.seconds[:2]
    return max(0.0, first - n * (second - first) / (m - n))


_STEPS = (4, 16, 64)
"""Sizes for a group without samples, as multiples and fractions of the measured sizes. It gets its modelled times
there, scaled."""


@dataclass(frozen=True)
class CollectiveTime:
    """A measured collective: `kind` over `axes` of the mesh, `nbytes` as `cost_model.collectives` counts."""

    kind: str
    axes: tuple[str, ...]
    nbytes: int
    seconds: float


def corrected_profile(
    profile: Profile, mesh: MeshSpec, times: Sequence[CollectiveTime], compute_factor: float, note: str
) -> Profile:
    """`profile` with the measured collectives in it, and kernels `compute_factor` times as long.

    A measured time replaces the sample of its kind, group and size, or joins the other samples. Those are
    moved no further than makes times grow with size. A group without samples gets its modelled times, scaled by
    the ratio of measured to modelled at the nearest measured size. The link levels that it uses get
    slower, or faster, by that ratio, because their other prices are as wrong. No time beats the
    links' peak. `nominal` stays. note: goes to `sources`.
    """
    assert compute_factor > 0.0, compute_factor
    prices = CollectivePrices(profile, mesh)
    samples = {(s.kind, s.group): s for s in profile.collectives}
    ratios: dict[int, list[float]] = {}  # link level -> measured / modelled of what it carries
    for (kind, axes), points in _by_group(times, mesh).items():
        group = group_shape(mesh, axes)
        groups = mesh_occupancies(mesh, axes, profile.link_domains)
        slope = max(floor_slope(kind, one, profile.links) for one in groups)
        measured = _above(dict(zip(points, monotone(list(points.values())), strict=True)), slope)
        known = samples.get((kind, group))
        if known is None:
            ratio = statistics.median(s / prices.seconds(kind, axes, n) for n, s in measured.items())
            for level in {use.level for one in groups for use in one.uses}:
                ratios.setdefault(level, []).append(ratio)
        before = (
            _above(_modelled(prices, kind, axes, measured), slope)
            if known is None
            else dict(zip(known.nbytes, known.seconds, strict=True))
        )
        samples[kind, group] = _merged(kind, group, before, measured)
    by_level = {level: statistics.median(values) for level, values in ratios.items()}
    name = profile.name.removesuffix(" (corrected)") + " (corrected)"
    return replace(
        profile,
        name=name,
        sources=(*profile.sources, note),
        collective_launch_seconds=profile.collective_launch_seconds * by_level.get(0, 1.0),
        links=tuple(_slowed(link, by_level.get(i, 1.0)) for i, link in enumerate(profile.links)),
        collectives=tuple(samples.values()),
        device=replace(paced(profile.device, compute_factor), update=profile.device.update),
    )


def with_timed_collectives(profile: Profile, mesh: MeshSpec, timed: Sequence[TimedCollective]) -> Profile:
    """`profile` with what was timed over groups that `mesh` has (`corrected_profile`)."""
    axes = shapes_of(mesh)
    times = [CollectiveTime(c.kind, axes[c.group], c.nbytes, c.seconds) for c in timed if c.group in axes]
    if not times:
        return profile
    return corrected_profile(profile, mesh, times, 1.0, "Collectives of the plan: timed one by one.")


def _by_group(
    times: Sequence[CollectiveTime], mesh: MeshSpec
) -> dict[tuple[str, tuple[str, ...]], dict[int, float]]:
    """(kind, axes) -> size -> median seconds. The first of several axes with equal group shapes stands for all."""
    names: dict[tuple[str, GroupShape], tuple[str, ...]] = {}
    found: dict[tuple[str, tuple[str, ...]], dict[int, list[float]]] = {}
    for time in times:
        shape = group_shape(mesh, time.axes)
        if shape and time.nbytes > 0:
            axes = names.setdefault((time.kind, shape), time.axes)
            found.setdefault((time.kind, axes), {}).setdefault(time.nbytes, []).append(time.seconds)
    return {
        key: {nbytes: statistics.median(values) for nbytes, values in sorted(sizes.items())}
        for key, sizes in found.items()
    }


def _slowed(link: LinkLevel, ratio: float) -> LinkLevel:
    peak = link.peak_bytes_per_second
    return with_rates(
        link, lambda rate: min(rate / ratio, peak), latency_seconds=link.latency_seconds * ratio
    )


def _above(points: Mapping[int, float], slope: float) -> dict[int, float]:
    """Times that `slope` allows, but for rounding."""
    return {nbytes: max(seconds, slope * nbytes * (1 + 1e-9)) for nbytes, seconds in points.items()}


def _modelled(
    prices: CollectivePrices, kind: str, axes: tuple[str, ...], measured: Mapping[int, float]
) -> dict[int, float]:
    found: dict[int, float] = {}
    smallest, largest = min(measured), max(measured)
    below = [(max(1, smallest // step), smallest) for step in _STEPS]
    for nbytes, nearest in (*below, *((largest * step, largest) for step in _STEPS)):
        ratio = measured[nearest] / prices.seconds(kind, axes, nearest)
        found[nbytes] = prices.seconds(kind, axes, nbytes) * ratio
    return found


def _merged(
    kind: str, group: GroupShape, before: Mapping[int, float], measured: Mapping[int, float]
) -> CollectiveSamples:
    """The measured points as they are, the others between them."""
    points = dict(measured)
    for nbytes, seconds in before.items():
        if nbytes not in measured:
            low = max((s for n, s in measured.items() if n < nbytes), default=0.0)
            high = min((s for n, s in measured.items() if n > nbytes), default=float("inf"))
            points[nbytes] = min(max(seconds, low), high)
    sizes = tuple(sorted(points))
    return CollectiveSamples(kind, group, sizes, tuple(points[n] for n in sizes))


def profile_text(profile: ProfileRecord) -> str:
    """Name, origin, device rates (TFLOP/s, GB/s) and links (GB/s per device, microseconds)."""
    origin = "nominal: not measured on any machine" if profile.nominal else f"measured {profile.date}"
    device = profile.device
    lines = [
        f"{profile.name}: {profile.hardware} ({origin})",
        f"  device      {profile.device_type}, memory {device.memory_bytes_per_second / 1e9:.4g} GB/s, "
        f"launch {device.launch_seconds * 1e6:.3g} us",
    ]
    for rate in device.matmul:
        peak = max(rate.flops_per_second) / 1e12
        lines.append(f"  products    {rate.dtype}, up to {peak:.4g} TFLOP/s")
    for link in profile.links:
        lines.append(f"  link        {_link(link)}")
    launch = profile.collective_launch_seconds * 1e6
    lines.append(
        f"  collectives {len(profile.collectives)} measured, launch {launch:.3g} us, "
        f"{profile.overlap_efficiency:.0%} of the overlap with computing hidden"
    )
    if profile.lateness is not None:
        behind, late = profile.lateness.computing_seconds[-1], profile.lateness.seconds[-1]
        lines.append(f"  ranks       late by {late * 1e3:.3g} ms behind {behind * 1e3:.3g} ms of computing")
    return "\n".join(lines)


def _link(link: LinkLevel) -> str:
    reach = "all ranks" if link.ranks is None else f"{link.ranks} ranks"
    rate = f"{link.bytes_per_second / 1e9:.4g} of {link.peak_bytes_per_second / 1e9:.4g} GB/s"
    return f"{link.name} ({reach}), {rate}, hop {link.latency_seconds * 1e6:.3g} us"


class Profile(ProfileRecord):
    """A `ProfileRecord` that can be measured and read from benchmarks."""

    @classmethod
    def measure(
        cls,
        mesh: DeviceMesh,
        *,
        time_budget: float = 60.0,
        largest_nbytes: int | None = None,
        name: str = "measured",
        command: str = "Profile.measure",
        progress: Progress = lambda what, spent: None,
        clock: Clock | None = None,
        attend: Attend | None = None,
    ) -> Self:
        """Measure the machines that `mesh` runs on, under torch.distributed (NCCL or gloo).

        Call it on every rank of the mesh at once, on otherwise idle machines; all get the same profile.
        It measures collectives of every kind that plans emit, over every group of mesh axes; matrix products by
        dtype and size; memory bandwidth, launch time and overlap.

        time_budget:    seconds in all, shared fairly: sizes are left out from the largest down, then
                        repetitions. At least three sizes of everything are measured, which may take longer.
        largest_nbytes: of a collective; None: 64 MiB on CPUs, 1 GiB on GPUs.
        name, command:  recorded in the profile.
        progress:       told what is being measured and the share of the budget spent.
        clock:          what times the work; None: the device's own.
        attend:         (q, k, v) -> out, the attention that is timed; None: torch's own. Plans run other kernels,
                        `autoshard.profiling.startup`; `autoshard profile` gives it.

        Raises ProfileError, on all ranks, if one of them fails between two measurements, and ShardingError
        for a mesh over ranks other than 0, 1, 2, ...
        """
        from cost_model.measure.measure import measure_profile  # imports torch, which prices do not need

        given = time_budget, largest_nbytes, name, command, progress, clock, attend
        return cls._of(measure_profile(mesh, *given))

    @classmethod
    def from_nccl_tests(
        cls,
        *paths: str | os.PathLike[str],
        base: ProfileRecord | str | os.PathLike[str] = "h100",
        rank_stride: int | None = None,
        busbw_limit: float | None = None,
    ) -> Self:
        """Collectives from benchmark outputs, all else from `base`: see `cost_model.readers.read_profile`."""
        return cls._of(read_profile(paths, base, rank_stride=rank_stride, busbw_limit=busbw_limit))

    @classmethod
    def _of(cls, record: ProfileRecord) -> Self:
        return cls(**vars(record))

    def summary(self) -> str:
        """The profile for people: a line per rate and link."""
        return profile_text(self)
