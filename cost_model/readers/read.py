"""`read_profile`: a profile from what other people's benchmarks printed."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

from cost_model.errors import ProfileError, checked_path, is_number, is_whole, log, shown
from cost_model.groups import GroupShape, shape_text
from cost_model.measurements import CollectiveSamples, LinkLevel, pooled
from cost_model.mesh import MOST_DEVICES
from cost_model.profile_record import ProfileRecord
from cost_model.readers.nccl_json import read_nccl_json
from cost_model.readers.nccl_text import read_nccl_text
from cost_model.readers.points import Group, Place, Point, Run, refuse
from cost_model.readers.result_rows import check_speed
from cost_model.readers.stas00 import read_stas00


def read_profile(
    paths: Iterable[str | os.PathLike[str]],
    base: ProfileRecord | str | os.PathLike[str] = "h100",
    *,
    rank_stride: int | None = None,
    busbw_limit: float | None = None,
) -> ProfileRecord:
    """A profile with the collectives of benchmark outputs, and everything else from `base`.

    paths:       nccl-tests text or JSON (-J), torch.distributed benchmark tables; each file's format is
                 recognised by itself.
    base:        a profile, its file, or the name of a shipped one: links, device rates, launch times and
                 overlap come from it. Its measured collectives stay where the files have none for that
                 kind and group.
    rank_stride: distance on your mesh of neighbouring ranks of the benchmark: 8 if it ran on one GPU of
                 each node of 8. None: 1, as long as the hosts in the files agree with the base's links.
    busbw_limit: highest bus bandwidth to believe, bytes per second. The links' peak holds in any case.

    The result is not nominal: groups that were measured are priced as "measured", all others as
    "modelled". Its name and `sources` say what is still of a nominal base. Rows that were left out
    are in `sources` too. Times that were averaged or replaced are there and in a logged warning.

    Raises ProfileError with file and line, the text there and a remedy for anything garbled, cut, wrong,
    contradictory or impossible.
    """
    start = base if isinstance(base, ProfileRecord) else ProfileRecord.load(base)
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
        raise ProfileError(f"paths is {shown(paths)}\n  try: a list of files")
    files = [checked_path(path, "a path of a benchmark's output", ProfileError) for path in paths]
    if not files:
        raise ProfileError("no benchmark output is given\n  try: one or more files")
    if start.device_type != "cuda":
        raise ProfileError(
            f"base profile {start.name!r} is of device type {start.device_type!r}; these benchmarks measure GPUs\n"
            "  try: a base of the GPUs' links and rates, such as 'h100'"
        )
    _check_options(rank_stride, busbw_limit)
    runs = [
        _placed(run, start, rank_stride)
        for path in files
        for run in _read(path)
        if run.points or not run.kind
    ]
    for run in runs:
        check_speed(run, start.links, busbw_limit)
    if not any(run.points for run in runs):
        raise ProfileError(
            f"{files[0]}: no row counts: too few digits are printed for its time and bandwidth to confirm "
            "one another, or the collective has no price\n"
            "  try: larger sizes (-e 1G), or nccl-tests -J, which prints more digits"
        )
    return _profile(start, files, runs)


def _check_options(rank_stride: object, busbw_limit: object) -> None:
    if rank_stride is not None and not (is_whole(rank_stride) and 1 <= rank_stride <= MOST_DEVICES):
        raise ProfileError(f"rank_stride is {shown(rank_stride)}\n  try: 1 or more")
    if busbw_limit is not None and not (is_number(busbw_limit) and busbw_limit > 0):
        raise ProfileError(f"busbw_limit is {shown(busbw_limit)}\n  try: bytes per second, above zero")


def _read(path: Path) -> tuple[Run, ...]:
    """The runs in a file, by the reader of its format."""
    try:
        text = path.read_text(encoding="utf-8")
        when = datetime.fromtimestamp(path.stat().st_mtime)
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read {path}: {error}\n  try: a text or JSON file") from error
    name = str(path)
    if text.lstrip().startswith("{"):
        return read_nccl_json(name, text, when)
    if "#wrong" in text or "# nThread" in text or "# Rank" in text or "#  Rank" in text:
        return read_nccl_text(name, text, when)
    if "busbw" in text or "algbw" in text:
        return read_stas00(name, text, when)
    refuse(
        Place(name, 1),
        "the file is neither output of nccl-tests nor a table of payload, busbw and algbw",
        text[:80],
        "nccl-tests (all_reduce_perf ..., also with -J), or all_reduce_bench.py",
    )


def _placed(run: Run, base: ProfileRecord, rank_stride: int | None) -> Run:
    """The run with its ranks where they are on the user's mesh."""
    if rank_stride is None:
        _check_hosts(run, base.links)
        return run
    shape = tuple((ranks, stride * rank_stride) for ranks, stride in run.group.shape)
    return replace(run, group=Group(shape))


def _profile(base: ProfileRecord, files: Sequence[Path], runs: Sequence[Run]) -> ProfileRecord:
    collectives, changes = merged(runs)
    kept = () if base.nominal else base.collectives
    measured = {(samples.kind, samples.group) for samples in collectives}
    stay = tuple(samples for samples in kept if (samples.kind, samples.group) not in measured)
    if gone := len(kept) - len(stay):
        changes = (*changes, f"{gone} measured collectives of {base.name} are replaced by those of the files")
    for change in changes:
        log.warning("%s", change)
    newest = max(point.when for run in runs for point in run.points)
    return replace(
        base,
        name=f"{base.name}{' (nominal)' if base.nominal else ''} with measured collectives",
        nominal=False,
        hardware=_hardware(base, runs),
        software=tuple(dict(item for run in runs for item in run.software).items()),
        date=newest.date().isoformat(),
        command="autoshard profile --read " + " ".join(str(path) for path in files),
        sources=(*map(_source, runs), *_left_out(runs), *changes, *_from_base(base)),
        collectives=(*collectives, *stay),
    )


def _source(run: Run) -> str:
    times = sorted(point.when for point in run.points)
    when = f", {times[-1]:%Y-%m-%d %H:%M}" if times else ""
    return f"{run.place}: {run.title}, {shape_text(run.group.shape)}, {len(run.points)} sizes{when}"


def _left_out(runs: Sequence[Run]) -> list[str]:
    texts: list[str] = []
    for run in runs:
        if run.kind is None:
            texts.append(f"{run.place}: {run.title} is left out: no collective of a plan")
        elif run.unproved:
            texts.append(
                f"{run.place}: {run.unproved} rows of {run.kind} are left out: too few digits to confirm their times"
            )
    return texts


def _hardware(base: ProfileRecord, runs: Sequence[Run]) -> str:
    devices = ", ".join(dict.fromkeys(run.device for run in runs if run.device))
    return f"{devices or 'unknown devices'}; links and device rates as of: {base.hardware}"


def _from_base(base: ProfileRecord) -> list[str]:
    whose = "NOMINAL, not measured" if base.nominal else f"measured {base.date}"
    texts = [
        f"links, device rates, launch times and overlap are those of {base.name} ({whose}), hash {base.hash()}"
    ]
    return texts + [f"{base.name}: {source}" for source in base.sources]


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


def _check_hosts(run: Run, links: Sequence[LinkLevel]) -> None:
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
