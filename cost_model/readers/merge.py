"""Points of all files to one curve for each kind and group: the newest of each size, never falling."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from cost_model.curve import pooled
from cost_model.errors import ProfileError
from cost_model.groups import GroupShape, floor_slope, group_ranks, occupancy, shape_text
from cost_model.measurements import CollectiveSamples, LinkLevel
from cost_model.readers.points import Point, Run, refuse

Curves = dict[tuple[str, GroupShape], list[Point]]


def merged(runs: Sequence[Run]) -> tuple[tuple[CollectiveSamples, ...], tuple[str, ...]]:
    """Curves for a profile, and what was done to get them, in sentences.

    The newer of two points of one kind, group and size counts; if they are equally old, the later in `runs`.
    Raises ProfileError, naming file and line, for a time further below that of fewer bytes than noise
    explains, and for a curve of a single size.
    """
    curves: Curves = defaultdict(list)
    for run in runs:
        if run.kind is not None and run.points:
            curves[run.kind, run.group.shape].extend(run.points)
    notes: list[str] = []
    samples: list[CollectiveSamples] = []
    for (kind, shape), points in sorted(curves.items()):
        title = f"{kind} over {shape_text(shape)}"
        newest, replaced = _newest(points)
        notes += [f"{title}: {text}" for text in replaced]
        times, smoothed = _rising(newest)
        notes += [f"{title}: {text}" for text in smoothed]
        samples.append(CollectiveSamples(kind, shape, tuple(point.nbytes for point in newest), times))
    return tuple(samples), tuple(notes)


def _newest(points: Iterable[Point]) -> tuple[list[Point], list[str]]:
    """One point a size, sizes increasing; and which file's points gave way to which."""
    best: dict[int, Point] = {}
    given_way: Counter[tuple[str, str]] = Counter()
    for point in points:
        other = best.get(point.nbytes)
        if other is not None:
            old, new = (point, other) if point.when < other.when else (other, point)
            given_way[old.place.file, new.place.file] += 1
            point = new
        best[point.nbytes] = point
    texts = [
        f"{count} {'size' if count == 1 else 'sizes'} of {old} replaced by the newer of {new}"
        for (old, new), count in given_way.items()
    ]
    return [best[size] for size in sorted(best)], texts


def _rising(points: Sequence[Point]) -> tuple[tuple[float, ...], list[str]]:
    """The times of `points`, made non-decreasing where they fall by no more than noise."""
    if len(points) < 2:
        (point,) = points
        point.refuse(
            "a curve needs two sizes or more, and this is the only one that counts",
            "run the benchmark over a range of sizes (nccl-tests: -b 1K -e 1G -f 2)",
        )
    times = [point.seconds for point in points]
    i, j, fall = worst_fall(times)
    before, now = points[i], points[j]
    if fall > NOISE:
        now.refuse(
            f"{now.nbytes} bytes took {now.seconds * 1e6:.4g} us, {fall:.1%} less than the "
            f"{before.seconds * 1e6:.4g} us of {before.nbytes} bytes at {before.place}; "
            f"noise explains {NOISE:.0%}",
            "measure again with more iterations (-n 100 -w 20), or leave out the older of two runs",
        )
    rising = tuple(pooled([[time] for time in times], fmean))
    changed = sum(a != b for a, b in zip(times, rising, strict=True))
    if not changed:
        return rising, []
    return rising, [
        f"{changed} of {len(times)} times averaged with neighbours: they fell by up to {fall:.1%}"
    ]


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
            point.refuse(
                f"a bus bandwidth of {point.busbw / 1e9:.4g} GB/s is over the stated limit of "
                f"{busbw_limit / 1e9:.4g} GB/s",
                "check the units, or state another busbw_limit (bytes per second)",
            )
        if point.seconds < slope * point.nbytes:
            point.refuse(
                f"{point.nbytes} bytes in {point.seconds * 1e6:.4g} us; at the links' peak, {run.kind} over "
                f"{run.group.size} ranks takes at least {slope * point.nbytes * 1e6:.4g} us",
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


NOISE = 0.40
"""How far a time may fall below that of fewer bytes and still be taken for noise, relative.

Small messages all take the same time, give or take 10 to 20 per cent. Where NCCL changes its algorithm or
protocol a larger message can be faster than a smaller one: 34 per cent was seen between 4 and 8 MiB on two
nodes, in every run. One disturbed measurement is usually several times too long.
"""


def worst_fall(times: Sequence[float]) -> tuple[int, int, float]:
    """(i, j, fall): times[j] is `fall` (relative) below the earlier times[i], the most of all pairs."""
    worst = (0, 0, 0.0)
    highest = 0
    for j, time in enumerate(times):
        if time >= times[highest]:
            highest = j
        elif 1.0 - time / times[highest] > worst[2]:
            worst = (highest, j, 1.0 - time / times[highest])
    return worst
