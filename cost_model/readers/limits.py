"""Refuses bandwidths that the links cannot reach, and hosts that the links do not describe."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.errors import ProfileError
from cost_model.groups import group_ranks, occupancy
from cost_model.link_model import floor_slope
from cost_model.measurements import LinkLevel
from cost_model.readers.points import Run, refuse

__all__ = ["check_hosts", "check_speed"]


def check_speed(run: Run, links: Sequence[LinkLevel], busbw_limit: float | None) -> None:
    """ProfileError for a point that the links' peak rates, or a stated bus bandwidth, rule out.

    The links decide by `floor_slope`: an all-reduce needs only S bytes through each port, because switches may
    reduce (NVLink SHARP reports more bus bandwidth than its links have). `busbw_limit`, in bytes per
    second, holds for the bus bandwidth as it was printed.
    """
    if run.kind is None:
        return
    slope = floor_slope(run.kind, _occupancy(run, links), links)
    for point in run.points:
        if busbw_limit is not None and point.busbw > busbw_limit:
            refuse(
                point.place,
                f"a bus bandwidth of {point.busbw / 1e9:.4g} GB/s is over the stated limit of "
                f"{busbw_limit / 1e9:.4g} GB/s",
                point.text,
                "check the units, or state another busbw_limit (bytes per second)",
            )
        if point.seconds < slope * point.nbytes:
            refuse(
                point.place,
                f"{point.nbytes} bytes in {point.seconds * 1e6:.4g} us; at the links' peak, {run.kind} over "
                f"{run.group.size} ranks takes at least {slope * point.nbytes * 1e6:.4g} us",
                point.text,
                "check the units; if the machine is faster than its base profile, take a base with its links",
            )


def _occupancy(run: Run, links: Sequence[LinkLevel]):
    try:
        return occupancy(group_ranks(run.group.shape), [link.ranks for link in links])
    except ProfileError as error:
        raise ProfileError(f"{run.place}: {error}") from error


def check_hosts(run: Run, links: Sequence[LinkLevel]) -> None:
    """ProfileError if ranks that the base's innermost link joins were on several hosts.

    Eight ranks on eight hosts are not the eight of one node, though both are numbered 0 to 7.
    """
    inner, hosts = links[0].ranks, run.group.hosts
    if inner is None or not hosts:
        return
    for first in range(0, len(hosts), inner):
        there = list(dict.fromkeys(hosts[first : first + inner]))
        if len(there) > 1:
            last = min(first + inner, len(hosts)) - 1
            refuse(
                run.place,
                f"ranks {first} to {last} ran on {len(there)} hosts; in the base profile one {links[0].name} "
                f"domain joins {inner} ranks",
                ", ".join(there),
                "a base whose links[0].ranks is the number of ranks on a host; if each rank here stands for a "
                f"whole host, rank_stride={inner}; if the domain spans these hosts, rank_stride=1",
            )
