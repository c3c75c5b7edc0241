"""States for several rooms, until the program that they make is within a limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from autoshard.plan.infeasible import too_much
from autoshard.plan.judged import Spared
from cost_model.deadline import Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.search.find import Found
from passes.search.find_states import ENOUGH, NoStates, OfferedStates, States
from passes.search.narrowing import Narrowing
from passes.states.compute_again import compute_again

_STATES_SHARE = 0.5
"""Share of the time left in which states must be chosen, each time."""
_TRIES = 10
"""Rooms as counted for which states are chosen, at most."""
_LESS = 1.25
"""What is too much, so often, is how much smaller the next room is: not all that the search counts is at the peak."""
_STEP = 0.01
"""Share of the limit by which it is smaller at least, from the second on."""
_MORE = 1e-3
"""Where no plan fits as counted: share by which the next room is larger than the least that any plan needs."""
_RAISE, _FURTHEST = 1.05, 1.5
"""By how much it is larger where that is not enough, as long as no program is known; and how far, of the limit."""
_UNUSED = 0.03
"""Share of the limit that a plan may leave unused before a larger room is tried."""
_WORTH = 0.01
"""Share of the time that states may have to save, by the bound, for one more room to be proven."""
_ROOMIER = 3
"""How often less is kept, at most, for transfers to hold more."""
_CLOSE = 0.02
"""Share of the limit that rooms must differ by to be tried, once one is known to be too small and one too large."""
_FOLLOWS, _STUCK = 0.25, 2
"""Share of what rooms shrink by that peaks of programs must shrink by, and how often in a row they may not: then it is
the layouts that hold so much, or what the search does not count."""
_RECOUNTS = 2
"""How often states are counted as the best program of theirs overlaps."""
LITTLE = 0.01
"""Share of the time that less in transfers may cost for no other states to be searched, and by which programs may be
slower than they were counted for states not to be counted anew."""


class Chosen(Protocol):
    """What programs within a limit have in common: states' layouts, or a family's."""

    def narrowing(self, task: Narrowing, /) -> Narrowing:
        """What is left of all that the task allows."""
        ...


Fastest = Callable[[JointGraph, Chosen | None, int | None, int, Deadline], Found]
"""The fastest plan of a graph, of those that are chosen, within a limit less a reserve."""


@dataclass(frozen=True)
class Way:
    """One set of collectives. fastest: the plans that it gives; offer: states, from the fastest plan of all."""

    fastest: Fastest
    offer: Callable[[Found], OfferedStates]


@dataclass
class RoomSearch:
    """The search counts a little more or less than a program holds, by what differs between plans; and plans differ in
    what they need besides. So states are chosen for several rooms as it counts, the first of them what the fastest plan
    would leave of the limit, until their program fits.

    needs: bytes of a plan, with what it needs besides. reserve, spared: of `StatesWithin`. whole: the fastest plan.
    faster: than this a plan has to be, in seconds. anyway: of `StatesWithin`.
    best: that fits, and its states. least: of those that do not. refused: why there were no states for `room`, all that
    the limit leaves. low: no states are within less. high: a room of which the program was too large. raised: a larger
    room is tried than what fitted. wide: other layouts are tried from the first on. roomier: how often less was tried,
    for transfers to hold more. late: time ended the search of states. recounts: how often seconds were counted anew.
    proven: rooms in which other layouts were tried since. bound: no states in any of these take less."""

    joint: JointGraph
    needs: Callable[[Found], int]
    reserve: Callable[[Found | None], int]
    spared: Callable[[Found], Spared]
    way: Way
    whole: Found
    limit: int
    faster: float
    anyway: list[Found]
    deadline: Deadline
    best: tuple[Found, States] | None = None
    least: Found | None = None
    refused: InfeasibleError | None = None
    room: int = 0
    low: int = 0
    high: int | None = None
    peak: int = 0
    stuck: int = 0
    raised: bool = False
    late: bool = False
    wide: bool = False
    patient: bool = False
    roomier: int = 0
    recounts: int = 0
    proven: set[int] = field(default_factory=set[int])
    bound: float = math.inf

    @cached_property
    def offered(self) -> OfferedStates:
        return self.way.offer(self.whole)

    def run(self) -> Found | None:
        """States for layouts as they are known first; where their program fits, with what other layouts can do. If none
        fits, or smaller rooms do not tell on them, those of any layouts. None: by the bound none is as fast."""
        try:
            self._rooms()
            if self._is_hopeless:
                return self.best[0] if self.best is not None else None
            gave_up = self.stuck >= _STUCK
            for wide in (True, False) if gave_up else (True,):
                if self.best is None:
                    self.wide, self.patient, self.high = wide, not wide, None
                    self._rooms()
        except InfeasibleError as reason:
            self.refused = self.refused or reason
        if self.best is None and self.faster == math.inf:
            self._smallest()
        if self.best is not None:
            return self.best[0]
        raise self.refused or too_much(self.limit, self.least or self.whole)

    def _smallest(self) -> None:
        """The least room that has states, looked for anew: what an error of a smaller limit says would fit does fit."""
        room, anew = 0, replace(self, low=0, high=None, wide=False, least=None, proven=set(), faster=math.inf)
        with suppress(InfeasibleError):
            while not (anew.best or anew.least) and room < max(1, anew.low):
                room = max(1, anew.low)
                anew._tried(room)
        self.best = anew.best
        if anew.least is not None and not anew.late:
            self.anyway += [anew.least, *anew.least.rivals]

    def _rooms(self) -> None:
        counted: int | None = self.limit - max(self.reserve(self.whole), 0)
        # What the pieces in flight keep is counted with the step, and another plan keeps less of it.
        if counted <= 0 or self.joint.in_flight > 1:
            counted = self.limit - self.reserve(None)
        self.room = counted
        for _ in range(_TRIES):
            counted = self._tried(counted)
            if counted is None:
                return
        if self.best is not None and not self.proven:
            self._tried(self.best[1].room)

    def _tried(self, counted: int) -> int | None:
        """Choose states for a room as it is counted, and judge them; the next room, None if there is none."""
        proving = self.wide or (self.best is not None and (bool(self.proven) or counted == self.best[1].room))
        if proving and self._is_miscounted:
            self._recount()
        try:
            chosen = self._states(counted, prove=proving)
            if not proving and self.best is None and chosen.seconds >= self.faster:
                chosen, proving = self._states(counted, prove=True), True
        except NoStates as refused:
            return self._larger(refused, counted)
        except (InfeasibleError, OutOfTime):
            if self.best is None:  # else there was no time to look for a better one
                raise
            return None
        if proving:
            self.proven.add(counted)
            self.bound = min(self.bound, chosen.lower_bound)
            if self._is_hopeless:
                return None
            if self.best is not None and chosen.seconds >= self.best[1].seconds * (1.0 - ENOUGH):
                return None
        if self.best is not None and chosen.are(self.best[1]):
            self.raised = False
            return self._room_of_best()
        found = self._judged(chosen)
        return None if found is None else self._next(found, chosen, counted)

    @property
    def _is_hopeless(self) -> bool:
        """Whether it is proven that no states are as fast as is asked for."""
        return bool(self.proven) and self.bound >= self.faster

    @property
    def _is_miscounted(self) -> bool:
        """Whether the best program takes longer than its states were counted."""
        if self.best is None or self.recounts >= _RECOUNTS or not self.best[0].own:
            return False
        return self.best[0].seconds > self.best[1].seconds * (1.0 + LITTLE)

    def _recount(self) -> None:
        """Under the overlap of the best program; what was proven under another says nothing of it."""
        assert self.best is not None
        found, states = self.best
        self.offered.under(found.own)
        self.best = found, replace(states, seconds=found.seconds)
        self.recounts, self.bound = self.recounts + 1, math.inf
        self.proven.clear()

    def _larger(self, refused: NoStates, counted: int) -> int | None:
        """The next room where there are no states for one: what it counts may be more than what the program holds."""
        if counted >= self.room and self.refused is None:  # less says nothing of the limit
            self.refused = refused
        first, least = not self.low, int(refused.least * (1.0 + _MORE))
        self.low = max(self.low, least)
        if self.best is not None:
            return self._room_of_best()
        if self.high is not None:
            return self._between(self.high)
        larger = max(least, int(counted * (1.0 if first else _RAISE)))
        untold = self.least is None and larger <= _FURTHEST * self.limit
        return larger if larger > counted and (first or untold) else None

    def _between(self, high: int) -> int | None:
        """Halfway from what is too little to what is too much."""
        return (self.low + high) // 2 if high - self.low > _CLOSE * self.limit else None

    def _next(self, found: Found, chosen: States, counted: int) -> int | None:
        over = self.needs(found) - self.limit
        if over > 0:
            if self.raised:  # back to what fits
                self.raised = False
                return self._room_of_best()
            if self.least is None or found.peak_nbytes < self.least.peak_nbytes:
                self.least = found
            least = 0.0 if self.high is None else _STEP * self.limit
            room = min(chosen.nbytes, counted)
            self._follow(found, room)
            if self.stuck >= _STUCK and self.best is None and not (self.wide or self.patient):
                return None
            smaller = room - int(max(_LESS * over, least))
            return smaller if smaller > self.low else self._between(room)
        first = self.best is None
        if self.best is None or found.seconds < self.best[0].seconds:
            self.best = found, chosen
        self.raised = (
            first and -over > _UNUSED * self.limit and found.seconds > self.whole.seconds * (1.0 + ENOUGH)
        )
        if not self.raised:
            return self._roomier(found, min(chosen.nbytes, counted)) or self._room_of_best()
        larger = max(chosen.nbytes, counted) - over
        return larger if self.high is None else min(larger, (counted + self.high) // 2)

    def _follow(self, found: Found, room: int) -> None:
        """What states for a smaller room make of the peak."""
        if self.high is not None:
            follows = self.peak - found.peak_nbytes >= _FOLLOWS * (self.high - room)
            self.stuck = 0 if follows else self.stuck + 1
        self.high, self.peak = room, found.peak_nbytes

    def _room_of_best(self) -> int | None:
        """In which it is proven. Where the states that came of that make a slower program than they were counted, those
        of no more than the best holds may make a faster one."""
        if self.best is None:
            return None
        states = self.best[1]
        if states.room not in self.proven or self._is_miscounted:
            return states.room
        worth = states.seconds * (1.0 - _WORTH) > self.bound
        known = any(abs(room - states.nbytes) < _STEP * self.limit for room in self.proven)
        return states.nbytes if worth and not known else None

    def _roomier(self, found: Found, counted: int) -> int | None:
        """Less, if that leaves more to transfers and may gain something: what is computed again may take less."""
        spared = self.spared(found)
        room = counted - int(_LESS * spared.missing)
        worth = spared.missing > 0 and spared.gained > LITTLE * found.seconds
        if not worth or room <= self.low or self.roomier >= _ROOMIER:
            return None
        self.roomier += 1
        return room

    def _states(self, counted: int, *, prove: bool) -> States:
        latest, limit = self.deadline.share(_STATES_SHARE), (self.limit, self.reserve(None))
        found = self.offered.find(room=counted, limit=limit, deadline=latest, prove=prove, known=self.faster)
        self.late = latest.left <= 0.0
        return found

    def _judged(self, chosen: States) -> Found | None:
        """Its fastest program, that fits if one does; None where there was no time for it, and there is a better one
        than none."""
        graph = compute_again(self.joint, chosen.again)
        try:
            found = self.way.fastest(graph, chosen, None, 0, self.deadline)
            fit = (one for one in (found, *found.rivals) if self.needs(one) <= self.limit)
            return min(fit, key=lambda one: one.seconds, default=found)
        except (InfeasibleError, OutOfTime):
            if self.best is None:
                raise
            return None
