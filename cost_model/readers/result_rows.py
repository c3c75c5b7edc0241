"""Rows of benchmarks: of which collective they are, and whether each agrees with itself and with the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath

from cost_model.errors import ProfileError
from cost_model.groups import Occupancy, floor_slope, group_ranks, occupancy
from cost_model.measurements import KINDS, LinkLevel
from cost_model.readers.points import Line, Place, Point, Printed, Run, agree, busbw_factor, refuse

PROOF = 0.10
"""A time counts if the printed bandwidth confirms it to this relative precision."""

_UNITS = "times in microseconds and bandwidths in GB/s, as nccl-tests prints them; else run it again"


@dataclass(frozen=True)
class Side:
    """One half of a row, out-of-place or in-place.

    seconds: None where the file has CPU times instead (-C 1); then size / algbw is the time.
    algbw, busbw: bytes per second. wrong: elements found wrong, None if not checked.
    """

    seconds: Printed | None
    algbw: Printed
    busbw: Printed
    wrong: float | None


@dataclass(frozen=True)
class Measured(Line):
    """A row of a table. nbytes: its size. sides: () where no bandwidth was printed."""

    nbytes: int
    sides: tuple[Side, ...]


@dataclass(frozen=True)
class Row(Measured):
    """One of nccl-tests. item_bytes: of one element. root: -1 for none."""

    count: int
    item_bytes: int
    redop: str
    root: int


def row_points(
    kind: str | None, n: int, rows: Sequence[Measured], when: datetime
) -> tuple[tuple[Point, ...], int]:
    """Points of `rows` (out-of-place where there is one), and how many rows were left out as unproved; none of a kind
    that has no price.

    Raises ProfileError for wrong results and for times, sizes and bandwidths that do not fit together.
    """
    points: list[Point] = []
    unproved = 0
    for row in rows if kind else ():
        assert kind is not None
        for side in row.sides:
            _check_side(kind, n, row, side)
        if row.nbytes == 0:  # fewer bytes than ranks: nothing was sent
            continue
        point = _point(row, row.sides[0], when) if row.sides else None
        if point is None:
            unproved += 1
        else:
            points.append(point)
    return tuple(points), unproved


def _point(row: Measured, side: Side, when: datetime) -> Point | None:
    if side.algbw.uncertainty > PROOF:
        return None
    seconds = row.nbytes / side.algbw.value if side.seconds is None else side.seconds.value
    return Point(row.place, row.text, row.when or when, row.nbytes, seconds, side.busbw.value)


def _check_side(kind: str, n: int, row: Measured, side: Side) -> None:
    if side.wrong:
        row.refuse(
            f"{side.wrong:g} elements of the result were wrong (#wrong)",
            "repair the network or NCCL's settings first: what computes wrongly has no price",
        )
    if side.seconds is not None:
        if side.seconds.value <= 0:
            row.refuse("the time is zero", "run the benchmark again")
        size = Printed(float(row.nbytes), 0.0)
        moved = _product(side.seconds, side.algbw)
        if not agree(size, moved):
            row.refuse(
                f"size / time is {row.nbytes / side.seconds.value / 1e9:.4g} GB/s, "
                f"but algbw says {side.algbw.value / 1e9:.4g}",
                _UNITS,
            )
    factor = busbw_factor(kind, n)
    if not agree(side.algbw.times(factor), side.busbw):
        row.refuse(
            f"busbw is {side.busbw.value / 1e9:.4g} GB/s, but algbw times {factor:.4g} "
            f"({kind} over {n} ranks) is {side.algbw.value * factor / 1e9:.4g}"
        )


def _product(a: Printed, b: Printed) -> Printed:
    low, high = a.low * b.low, a.high * b.high
    return Printed((low + high) / 2, (high - low) / 2)


def check_average(footer: Line, rows: Sequence[Row], average: Printed) -> None:
    """The footer's average bus bandwidth (bytes per second) is that of all sides of all rows."""
    sides = [side.busbw for row in rows for side in row.sides]
    if not sides:
        footer.refuse("the table has no rows", "run the benchmark again")
    value, half = (
        sum(numbers) / len(sides) for numbers in zip(*((s.value, s.half) for s in sides), strict=True)
    )
    if not agree(Printed(value, half), average):
        footer.refuse(
            f"the average bus bandwidth is given as {average.value / 1e9:.5g} GB/s, but that of the "
            f"{len(rows)} rows above is {value / 1e9:.5g}: rows are missing or changed"
        )


PROGRAMS: dict[str, str | None] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "point_to_point",
    # No redistribution uses these; they have no price.
    "alltoallv": None,
    "gather": None,
    "hypercube": None,
    "reduce": None,
    "scatter": None,
}
"""Program without `_perf` -> kind of collective."""

ITEM_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "int", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}


def programs_in_name(file: str) -> tuple[str, ...]:
    """Programs that a file name speaks of: `h100-all_gather.txt` -> ("all_gather",). The longest only."""
    name = PurePath(file).name.replace("-", "_")
    found = [program for program in PROGRAMS if program in name]
    return tuple(p for p in found if not any(p != q and p in q for q in found))


def kind_of(place: Place, rows: Sequence[Row], n: int, program: str | None, file: str) -> str | None:
    """The kind of `rows` over n ranks; None for a program that has no price.

    program: named in the text, without `_perf`; if None, the name of the file counts. The rows must look
    like it (all-gather and all-to-all look alike, others do not).
    Raises ProfileError if the rows do not fit the name, or fit several kinds and there is no name.
    """
    named = (program,) if program is not None else programs_in_name(file)
    if len(named) == 1:
        kind = PROGRAMS[named[0]]
        if kind is not None:
            _check_looks(kind, named[0], n, rows)
        return kind
    fitting = [kind for kind in KINDS if all(_looks(kind, row, n) and scales(kind, row, n) for row in rows)]
    kinds = [kind for kind in fitting if not named or kind in [PROGRAMS[name] for name in named]]
    if len(kinds) == 1:
        return kinds[0]
    refuse(
        place,
        f"nothing names the collective, and the rows look like {' or '.join(kinds) or 'none that has a price'} "
        f"over {n} ranks",
        rows[0].text,
        "keep the line '# Collective test starting: ...', or name the file after the program "
        "(all_gather_perf.txt)",
    )


def _check_looks(kind: str, program: str, n: int, rows: Sequence[Row]) -> None:
    for row in rows:
        if not _looks(kind, row, n):
            row.refuse(
                f"the row is not one of {program}_perf over {n} ranks: size, count, type, redop and root "
                "do not fit together"
            )


def _looks(kind: str, row: Row, n: int) -> bool:
    """Size against count, operation and root of a row."""
    shared = kind in ("all_gather", "all_to_all", "reduce_scatter")
    reduces = kind in ("all_reduce", "reduce_scatter")
    if row.nbytes != row.count * row.item_bytes * (n if shared else 1):
        return False
    if kind != "point_to_point" and reduces != (row.redop != "none"):
        return False
    return (row.root >= 0) == (kind == "broadcast")


def scales(kind: str, row: Measured, n: int) -> bool:
    """Bus bandwidth against algorithm bandwidth."""
    factor = busbw_factor(kind, n)
    return all(agree(side.algbw.times(factor), side.busbw) for side in row.sides)


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


def _occupancy(run: Run, links: Sequence[LinkLevel]) -> Occupancy:
    try:
        return occupancy(group_ranks(run.group.shape), [link.ranks for link in links])
    except ProfileError as error:
        raise ProfileError(f"{run.place}: {error}") from error
