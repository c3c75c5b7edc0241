"""A profile whose links of one level are faster or slower: what a plan would face on another network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_model.groups import group_ranks, occupancy
from cost_model.link_model import floor_slope, model_lines
from cost_model.measurements import CollectiveSamples, LinkLevel
from cost_model.profile import Profile

__all__ = ["scaled_link"]


def scaled_link(profile: Profile, level: int, factor: float) -> Profile:
    """`profile` with every bandwidth of link level `level` times `factor`; latencies and starts stay.

    Of a measured collective, a + b(nbytes) seconds, the constant a stays (what its first two sizes come to at 0 bytes),
    and b is multiplied by what the link model says of the group: its seconds per byte with the new links over those
    with the old ones, so that a curve of other levels stays as it was. No time is below what the new peaks allow.
    """
    old = profile.links
    links = tuple(_scaled(link, factor) if i == level else link for i, link in enumerate(old))
    curves = tuple(_rescaled(samples, old, links) for samples in profile.collectives)
    name = f"{profile.name}, {old[level].name} x {factor:.3g}"
    return replace(profile, name=name, links=links, collectives=curves)


def _scaled(link: LinkLevel, factor: float) -> LinkLevel:
    reduced = link.reduced_bytes_per_second
    return replace(
        link,
        bytes_per_second=link.bytes_per_second * factor,
        peak_bytes_per_second=link.peak_bytes_per_second * factor,
        reduced_bytes_per_second=None if reduced is None else reduced * factor,
    )


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
