"""Rows of nccl-tests, text or JSON: each must agree with itself before its time counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cost_model.readers.points import Place, Point, busbw_factor, refuse
from cost_model.readers.printed import Printed, agree

__all__ = ["PROOF", "Row", "Side", "check_average", "row_points"]

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
class Row:
    """nbytes: the size column. item_bytes: of one element. root: -1 for none."""

    place: Place
    text: str
    nbytes: int
    count: int
    item_bytes: int
    redop: str
    root: int
    sides: tuple[Side, ...]
    when: datetime | None


def row_points(kind: str, n: int, rows: Sequence[Row], when: datetime) -> tuple[tuple[Point, ...], int]:
    """Points of `rows` (out-of-place where there is one), and how many rows were left out as unproved.

    Raises ProfileError for wrong results and for times, sizes and bandwidths that do not fit together.
    """
    points: list[Point] = []
    unproved = 0
    for row in rows:
        for side in row.sides:
            _check_side(kind, n, row, side)
        if row.nbytes == 0:  # fewer bytes than ranks: nothing was sent
            continue
        point = _point(row, row.sides[0], when)
        if point is None:
            unproved += 1
        else:
            points.append(point)
    return tuple(points), unproved


def _point(row: Row, side: Side, when: datetime) -> Point | None:
    if side.algbw.uncertainty > PROOF:
        return None
    seconds = row.nbytes / side.algbw.value if side.seconds is None else side.seconds.value
    return Point(row.nbytes, seconds, side.busbw.value, row.when or when, row.place, row.text)


def _check_side(kind: str, n: int, row: Row, side: Side) -> None:
    if side.wrong:
        refuse(
            row.place,
            f"{side.wrong:g} elements of the result were wrong (#wrong)",
            row.text,
            "repair the network or NCCL's settings first: what computes wrongly has no price",
        )
    if side.seconds is not None:
        if side.seconds.value <= 0:
            refuse(row.place, "the time is zero", row.text, "run the benchmark again")
        size = Printed(float(row.nbytes), 0.0)
        moved = _product(side.seconds, side.algbw)
        if not agree(size, moved):
            refuse(
                row.place,
                f"size / time is {row.nbytes / side.seconds.value / 1e9:.4g} GB/s, "
                f"but algbw says {side.algbw.value / 1e9:.4g}",
                row.text,
                _UNITS,
            )
    factor = busbw_factor(kind, n)
    if not agree(side.algbw.times(factor), side.busbw):
        refuse(
            row.place,
            f"busbw is {side.busbw.value / 1e9:.4g} GB/s, but algbw times {factor:.4g} "
            f"({kind} over {n} ranks) is {side.algbw.value * factor / 1e9:.4g}",
            row.text,
            "the whole output of one run, with the lines of all its ranks",
        )


def _product(a: Printed, b: Printed) -> Printed:
    low, high = a.low * b.low, a.high * b.high
    return Printed((low + high) / 2, (high - low) / 2)


def check_average(place: Place, text: str, rows: Sequence[Row], average: Printed) -> None:
    """The footer's average bus bandwidth (bytes per second) is that of all sides of all rows."""
    sides = [side.busbw for row in rows for side in row.sides]
    if not sides:
        refuse(place, "the table has no rows", text, "run the benchmark again")
    mean = Printed(
        sum(side.value for side in sides) / len(sides), sum(side.half for side in sides) / len(sides)
    )
    if not agree(mean, average):
        refuse(
            place,
            f"the average bus bandwidth is given as {average.value / 1e9:.5g} GB/s, but that of the "
            f"{len(rows)} rows above is {mean.value / 1e9:.5g}: rows are missing or changed",
            text,
            "the whole output of the run",
        )
