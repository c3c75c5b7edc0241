"""A profile corrected by what steps really took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cost_model.collectives import CollectivePrices
from cost_model.groups import GroupShape, group_shape, mesh_occupancies, shapes_of
from cost_model.link_model import floor_slope
from cost_model.measure.statistics import monotone
from cost_model.measurements import CollectiveSamples, LinkLevel
from cost_model.mesh import MeshSpec
from cost_model.pace import paced_device
from cost_model.profile import Profile
from cost_model.timed import TimedCollective

__all__ = ["CollectiveTime", "corrected_profile", "with_timed_collectives"]

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
    profile: Profile,
    mesh: MeshSpec,
    times: Sequence[CollectiveTime],
    compute_factor: float,
    note: str,
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
        slope = _floor_slope(profile, mesh, kind, axes)
        measured = _above(dict(zip(points, monotone(list(points.values())), strict=True)), slope)
        known = samples.get((kind, group))
        if known is None:
            ratio = statistics.median(s / prices.seconds(kind, axes, n) for n, s in measured.items())
            for level in _levels(profile, mesh, axes):
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
        device=replace(paced_device(profile.device, compute_factor), update=profile.device.update),
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


def _floor_slope(profile: Profile, mesh: MeshSpec, kind: str, axes: tuple[str, ...]) -> float:
    """Seconds per byte at the links' stated peak."""
    groups = mesh_occupancies(mesh, axes, profile.link_domains)
    return max(floor_slope(kind, group, profile.links) for group in groups)


def _levels(profile: Profile, mesh: MeshSpec, axes: tuple[str, ...]) -> set[int]:
    """The link levels that the groups along `axes` use."""
    return {use.level for group in mesh_occupancies(mesh, axes, profile.link_domains) for use in group.uses}


def _slowed(link: LinkLevel, ratio: float) -> LinkLevel:
    rate = min(link.bytes_per_second / ratio, link.peak_bytes_per_second)
    reduced = link.reduced_bytes_per_second
    return replace(
        link,
        latency_seconds=link.latency_seconds * ratio,
        bytes_per_second=rate,
        reduced_bytes_per_second=None
        if reduced is None
        else min(reduced / ratio, link.peak_bytes_per_second),
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
