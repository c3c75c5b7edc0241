"""Who sends what to whom when spans held of a dim become spans wanted of it.

    held   [0, 4) [4, 8)          wanted   [-1, 5) [3, 9)  of a periodic length 8
    rank 1 sends to rank 0:       [7, 8) to place 0 of its buffer, [4, 5) to place 5

Pure functions of numbers that all ranks know: every rank works out its own row and column of the table, and both
ends of a message agree on it without a word. Held spans do not overlap. Wanted spans may be anything; beyond
[0, length) they wrap around, so who does not want that clips them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from passes.layout.layout import Span, laps

__all__ = ["Piece", "Traffic", "anything_foreign", "exchange_traffic", "pieces", "reduce_traffic"]


class Piece(NamedTuple):
    """[lo, hi) of the dim, in global coordinates within [0, length), and its first place in the receiver's buffer."""

    lo: int
    hi: int
    place: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


def pieces(held: Span, wanted: Span, length: int) -> tuple[Piece, ...]:
    """What the holder of `held` has of `wanted`, in the order of places: several pieces where `wanted` wraps around."""
    if not length:
        return ()
    met = laps(wanted, held, length)
    return tuple(Piece(lo - shift, hi - shift, lo - wanted[0]) for (lo, hi), shift in met)


def anything_foreign(held: Sequence[Span], wanted: Sequence[Span], length: int) -> bool:
    """Whether any rank wants what it does not hold: all ranks know, so all enter the collective or none."""
    return any(
        sum(piece.size for piece in pieces(mine, want, length)) < want[1] - want[0]
        for mine, want in zip(held, wanted, strict=True)
    )


@dataclass(frozen=True)
class Traffic:
    """One rank's side of an exchange or a reduction.

    sent:     per rank, spans of the operand's dim, local; the own entry stays here.
    received: per rank, spans of the result's dim, local, in the order in which they arrive.
    length:   of the result's dim.
    foreign:  whether any rank sends anything to another.
    """

    sent: tuple[tuple[Span, ...], ...]
    received: tuple[tuple[Span, ...], ...]
    length: int
    foreign: bool


@lru_cache(maxsize=1024)
def exchange_traffic(held: tuple[Span, ...], wanted: tuple[Span, ...], length: int, rank: int) -> Traffic:
    """From parts to the spans wanted: what is received tiles the result."""
    mine, want = held[rank], wanted[rank]
    return Traffic(
        sent=tuple(tuple((p.lo - mine[0], p.hi - mine[0]) for p in pieces(mine, w, length)) for w in wanted),
        received=tuple(tuple((p.place, p.place + p.size) for p in pieces(h, want, length)) for h in held),
        length=want[1] - want[0],
        foreign=anything_foreign(held, wanted, length),
    )


@lru_cache(maxsize=1024)
def reduce_traffic(held: tuple[Span, ...], wanted: tuple[Span, ...], length: int, rank: int) -> Traffic:
    """The transpose: summands of the spans wanted go back to the parts, where what is received overlaps."""
    there = exchange_traffic(held, wanted, length, rank)
    return Traffic(there.received, there.sent, held[rank][1] - held[rank][0], there.foreign)
