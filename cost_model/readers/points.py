"""What every reader makes of a file: its lines, numbers as they were printed, and points measured on a group of ranks,
each with the file and line it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import NoReturn

from cost_model.errors import MOST_DIGITS, ProfileError
from cost_model.groups import GroupShape, group_ranks

WHOLE = "the whole output of one run, as it was printed"
"""The remedy for what is cut or garbled."""


@dataclass(frozen=True)
class Place:
    """A line of a file, as errors name it: `all_reduce.txt:14`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Group:
    """The ranks that communicated.

    shape: as in a profile; all groups of this shape communicated at the same time.
    hosts: host of every rank of the run, by rank; () if the file does not say.
    """

    shape: GroupShape
    hosts: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks in one group."""
        return len(group_ranks(self.shape))


@dataclass(frozen=True)
class Line:
    """What stands at a place. text: of a log without prefix and line end; when: its time, if it says one."""

    place: Place
    text: str
    when: datetime | None

    def refuse(self, problem: str, remedy: str = WHOLE) -> NoReturn:
        """ProfileError: file and line, what is wrong, the offending text, and a remedy."""
        refuse(self.place, problem, self.text, remedy)


@dataclass(frozen=True)
class Point(Line):
    """One measured time: `nbytes` in the convention of `cost_model.collectives`, `busbw` in bytes per second."""

    when: datetime
    nbytes: int
    seconds: float
    busbw: float


@dataclass(frozen=True)
class Run:
    """One table of a file: one collective on one group, at several sizes.

    kind:     None for a collective that has no price here, such as gather; its points are left out.
    title:    the collective and format in words.
    unproved: rows left out because too few digits are printed for their numbers to confirm one another.
    """

    kind: str | None
    title: str
    group: Group
    points: tuple[Point, ...]
    place: Place
    unproved: int = 0
    device: str = ""
    software: tuple[tuple[str, str], ...] = ()


def refuse(place: Place, problem: str, text: str, remedy: str) -> NoReturn:
    """ProfileError: file and line, what is wrong, the offending text, and a remedy."""
    shown = text.strip()
    shown = shown if len(shown) <= 160 else shown[:157] + "..."
    raise ProfileError(f"{place}: {problem}\n  read: {shown!r}\n  try: {remedy}")


def busbw_factor(kind: str, n: int) -> float:
    """Bus bandwidth over algorithm bandwidth of `kind` over n ranks. [nccl-tests doc/PERFORMANCE.md]"""
    if kind == "all_reduce":
        return 2.0 * (n - 1) / n
    if kind in ("broadcast", "point_to_point"):
        return 1.0
    return (n - 1) / n


def group_of(place: Place, members: Mapping[int, Sequence[int]], hosts: Mapping[int, str]) -> Group:
    """The shape shared by all groups of a run; `members` maps a group's number to its ranks.

    Raises ProfileError if ranks are missing or the groups are not all of one shape.
    """
    ranks = sorted(rank for group in members.values() for rank in group)
    if not ranks or ranks != list(range(len(ranks))):
        refuse(
            place,
            f"the lines of {len(ranks)} ranks do not name ranks 0 to {len(ranks) - 1} once each",
            ", ".join(map(str, ranks)),
            "the whole output of one run, started with MPI if it has several processes",
        )
    shapes = {_shape(tuple(sorted(group))) for group in members.values()}
    if len(shapes) > 1 or None in shapes:
        refuse(place, "the groups are not all of one regular shape", str(dict(members)), "another split")
    (shape,) = shapes
    assert shape is not None
    if not shape:
        refuse(
            place,
            "each group is a single rank: nothing was communicated",
            f"{len(ranks)} ranks",
            "build nccl-tests with MPI=1, or run on several GPUs (-g)",
        )
    return Group(shape, tuple(hosts[rank] for rank in ranks if rank in hosts))


def _shape(ranks: tuple[int, ...]) -> GroupShape | None:
    """(ranks, stride) pairs of sorted ranks, large strides first; None if they are not regular."""
    pairs: list[tuple[int, int]] = []
    rest = ranks
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        run = 1
        while run < len(rest) and rest[run] - rest[run - 1] == stride:
            run += 1
        pairs.insert(0, (run, stride))
        rest = rest[::run]
    shape = tuple(pairs)
    return shape if group_ranks(shape, ranks[0]) == ranks else None


_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_STAMPED = re.compile(rf"\s*[\[(]?({_STAMP})[\])]?:?(?:\s|$)")
_PREFIXES = (
    re.compile(r"\[\d+,\d+\]<std(?:out|err)>:\s?"),  # mpirun --tag-output
    re.compile(r"\s*\d+: (?=\s*[#|\d])"),  # srun --label
    re.compile(r"\[[\w.-]+\]:"),  # torchrun --tee: [default0]:
    re.compile(r"\[[\w.-]+:\d+\]:"),  # torchrun --role --tee: [host:0]:
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?=\s*[#|\d])"),  # ts
)


def lines_of(file: str, text: str) -> Iterator[Line]:
    """The lines of `text`, numbered from 1. A line that was redrawn with carriage returns has its last state."""
    for number, raw in enumerate(text.split("\n"), start=1):
        shown, when = _strip(raw.rstrip().rsplit("\r", 1)[-1])
        yield Line(Place(file, number), shown, when)


def _strip(text: str) -> tuple[str, datetime | None]:
    when: datetime | None = None
    stripped = True
    while stripped:
        stripped = False
        match = _STAMPED.match(text)
        if match:
            text, when, stripped = text[match.end() :], parse_time(match[1]), True
        for prefix in _PREFIXES:
            match = prefix.match(text)
            if match:
                text, stripped = text[match.end() :], True
    return text, when


def parse_time(text: str) -> datetime | None:
    """A time such as 2026-11-21 08:00:00, in local time without zone; None if it is not one."""
    try:
        when = datetime.fromisoformat(text.replace(",", "."))
    except ValueError:
        return None
    return when.astimezone().replace(tzinfo=None) if when.tzinfo else when


def whole_number(line: Line, digits: str) -> int:
    """An integer of `line`. ProfileError for more than 18 digits, which no benchmark prints and Python may refuse."""
    if len(digits) > MOST_DIGITS:
        line.refuse(f"a number has {len(digits)} digits")
    return int(digits)


_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)

_SLACK = 1e-6
"""Relative; covers arithmetic in other orders, and sizes in a float."""


@dataclass(frozen=True)
class Printed:
    """A number as a program printed it: value +- half a unit of its last digit, both >= 0."""

    value: float
    half: float

    @staticmethod
    def parse(text: str) -> Printed | None:
        """None unless `text` is a plain finite number >= 0."""
        if not _NUMBER.fullmatch(text):
            return None
        try:
            number = Decimal(text)
        except InvalidOperation:  # an exponent of more digits than there are
            return None
        exponent = number.as_tuple().exponent
        assert isinstance(exponent, int)
        if not number.is_finite() or not -300 < exponent < 300 or number.adjusted() > 300:
            return None
        return Printed(float(number), 0.5 * 10.0**exponent)

    def times(self, factor: float) -> Printed:
        """The same number in another unit."""
        return Printed(self.value * factor, self.half * factor)

    @property
    def uncertainty(self) -> float:
        """Relative; infinite for a printed zero."""
        return self.half / self.value if self.value > 0 else float("inf")

    @property
    def low(self) -> float:
        return max(0.0, self.value - self.half) * (1.0 - _SLACK)

    @property
    def high(self) -> float:
        return (self.value + self.half) * (1.0 + _SLACK)


def agree(a: Printed, b: Printed) -> bool:
    """Whether one true value can have been printed as both."""
    return a.low <= b.high and b.low <= a.high
