"""When gathers start whose operands are at hand: by their price and that of what is on the wire beside them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from passes.schedule.issue_order import PREFETCH, Place, place_behind

SLACK = 1.25
"""Times the price of a gather by which it is started before it is read. Others are on the wire as well."""


@dataclass(frozen=True)
class Prefetch:
    """elapsed: seconds of computing before each op of the phase, and in all. Per group of gathers, in the order in
    which they are read: read: position of its first reader; seconds: its price; nbytes: what it gathers; links: that
    they are over, () where all are over one. room: bytes that several may hold at once, where memory is short."""

    elapsed: Sequence[float]
    read: Sequence[int]
    seconds: Sequence[float]
    nbytes: Sequence[int]
    room: float = math.inf
    links: Sequence[int] = ()

    def places(
        self, awaited: Sequence[int], reductions: Sequence[Sequence[tuple[Place, float]]]
    ) -> list[tuple[int, Place]]:
        """Per group its depth and place, see `passes.schedule.issue_order.Ahead`. reductions: over each link, rising,
        the place of each and its seconds."""
        found: list[tuple[int, Place]] = []
        over = [self._arriving(each) for each in reductions]
        for i, (depth, start) in enumerate(self._depths()):
            place = self._behind_awaited(i, place_behind(self.read, i, depth), awaited)
            found.append(self._before_reductions(i, depth, place, start, over[self._link(i)]))
        return found

    def _arriving(self, reductions: Sequence[tuple[Place, float]]) -> list[tuple[Place, float]]:
        """When each has arrived, if one link has them alone: each waits for the one before it."""
        found: list[tuple[Place, float]] = []
        end = 0.0
        for place, seconds in reductions:
            end = max(end, self.elapsed[(place[0] + 1) // 2]) + seconds
            found.append((place, end))
        return found

    def _link(self, i: int) -> int:
        return self.links[i] if self.links else 0

    def _depths(self) -> list[tuple[int, float]]:
        """So deep that each group has arrived when it is read, if all later ones have to as well; when it must start
        for that."""
        depths: list[tuple[int, float]] = []
        free: dict[int, float] = {}  # by link, until when it may be busy with others
        for i in reversed(range(len(self.read))):
            arrives = min(self.elapsed[self.read[i]], free.get(self._link(i), math.inf))
            start = free[self._link(i)] = arrives - SLACK * self.seconds[i]
            depth = 1
            while depth <= i and self.elapsed[self.read[i - depth]] > start and self._fit(i, depth + 1):
                depth += 1
            depths.append((max(depth, PREFETCH) if math.isinf(self.room) else depth, start))
        return depths[::-1]

    def _fit(self, i: int, depth: int) -> bool:
        """Whether group `i` may be in flight with the `depth` - 1 before it."""
        # Times the bytes of the largest gather that those in flight may hold.
        return sum(self.nbytes[i + 1 - depth : i + 1]) <= min(4 * max(self.nbytes), self.room)

    def _latest(self, i: int) -> float:
        """When group `i` must be on the wire."""
        return self.elapsed[self.read[i]] - SLACK * self.seconds[i]

    def _behind_awaited(self, i: int, place: Place, awaited: Sequence[int]) -> Place:
        """`place`, or behind the awaited transfers that follow before so much is computed."""
        latest = self._latest(i)
        for position in awaited[bisect_left(awaited, place[0] // 2) :]:
            ready = self.elapsed[position + 1]
            if ready > latest or ready - self.elapsed[place[0] // 2] > SLACK * self.seconds[i]:
                break
            place = (2 * position + 1, 1)
        return place

    def _before_reductions(
        self, i: int, depth: int, place: Place, start: float, reductions: Sequence[tuple[Place, float]]
    ) -> tuple[int, Place]:
        """Before a reduction that is on the wire when the group should be."""
        for reduced, arrived in reversed(reductions):
            if reduced >= place:
                continue
            position = (reduced[0] + 1) // 2
            deeper = i + 1 - bisect_left(self.read, position)
            if arrived <= start or not self._fit(i, deeper):
                break
            depth, place = max(depth, deeper), (reduced[0], 0)
        return depth, place
