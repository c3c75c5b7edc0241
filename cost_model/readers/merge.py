"""Points of all files to one curve for each kind and group: the newest of each size, never falling."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from cost_model.groups import GroupShape, shape_text
from cost_model.measurements import CollectiveSamples
from cost_model.readers.points import Point, Run, refuse
from cost_model.readers.pool import NOISE, pooled, worst_fall

__all__ = ["merged"]

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
        refuse(
            point.place,
            "a curve needs two sizes or more, and this is the only one that counts",
            point.text,
            "run the benchmark over a range of sizes (nccl-tests: -b 1K -e 1G -f 2)",
        )
    times = [point.seconds for point in points]
    i, j, fall = worst_fall(times)
    before, now = points[i], points[j]
    if fall > NOISE:
        refuse(
            now.place,
            f"{now.nbytes} bytes took {now.seconds * 1e6:.4g} us, {fall:.1%} less than the "
            f"{before.seconds * 1e6:.4g} us of {before.nbytes} bytes at {before.place}; "
            f"noise explains {NOISE:.0%}",
            now.text,
            "measure again with more iterations (-n 100 -w 20), or leave out the older of two runs",
        )
    rising = pooled(times)
    changed = sum(a != b for a, b in zip(times, rising, strict=True))
    if not changed:
        return rising, []
    return rising, [
        f"{changed} of {len(times)} times averaged with neighbours: they fell by up to {fall:.1%}"
    ]
