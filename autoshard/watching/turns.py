"""What a rank does in turn, in a form that ranks compare: exchanges, forwards and backwards, numbered alike."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Turn", "Turns", "first_difference"]

KEPT = 32


@dataclass(frozen=True)
class Turn:
    """key: the same on all ranks. history: a hash of the keys up to and with this one. detail: of this rank alone,
    for people (local shapes, say)."""

    number: int
    key: str
    history: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.key} ({self.detail})" if self.detail else self.key


class Turns:
    """The turns of one rank. Its main thread writes, the watch reads; a turn costs about a microsecond."""

    def __init__(self) -> None:
        self.count = 0
        self.inside = False
        self._history = 0
        self._last: deque[Turn] = deque(maxlen=KEPT)

    def begin(self, key: str, detail: str = "") -> Turn:
        self.count += 1
        self._history = zlib.crc32(key.encode(), self._history)
        turn = Turn(self.count, key, self._history, detail)
        self._last.append(turn)
        self.inside = True
        return turn

    def end(self) -> None:
        self.inside = False

    def last(self) -> tuple[Turn, ...]:
        """The last turns, oldest first."""
        while True:
            try:
                return tuple(self._last)
            except RuntimeError:  # the main thread began a turn meanwhile
                continue


def first_difference(ours: Sequence[Turn], theirs: Sequence[Turn]) -> int | None:
    """The number of the first turn in which two ranks differ, of those that both have had; None if they agree.

    Where they parted before the turns that are still kept, the first of these.
    """
    known = {turn.number: turn.history for turn in ours}
    differing = (turn.number for turn in theirs if known.get(turn.number, turn.history) != turn.history)
    return next(differing, None)
