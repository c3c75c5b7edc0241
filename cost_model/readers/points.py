"""Points measured on a group of ranks, each with the file and line it came from. Every reader gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from cost_model.errors import ProfileError
from cost_model.groups import GroupShape, group_ranks

__all__ = ["Group", "Place", "Point", "Run", "busbw_factor", "group_of", "refuse"]


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
class Point:
    """One measured time: `nbytes` in the convention of `cost_model.collectives`, `busbw` in bytes per second.

    place: where it was read; text: what stands there.
    """

    nbytes: int
    seconds: float
    busbw: float
    when: datetime
    place: Place
    text: str


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
