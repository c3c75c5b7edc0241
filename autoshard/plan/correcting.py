"""States within a limit: what their program holds and takes is how the next are counted, until one fits and is near
the bound of what is counted so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from autoshard.plan.infeasible import too_much
from cost_model.deadline import Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.search.find import Found
from passes.search.find_states import ENOUGH, NoStates, OfferedStates, States
from passes.search.search_terms import Narrowing
from passes.search.state_columns import ROUGH, Held
from passes.states.compute_again import compute_again

_ROUNDS = 8
"""How often states are chosen, at most."""
_LESS = 0.02
"""Share of the limit by which the room is less, at least, where a program does not fit that is counted as one is."""
_PATIENCE = 2
"""How many programs in a row may be no faster, once one fits."""
_WORTH = 0.01
"""Share of the time that states must be able to save, by the bound, to be chosen once more."""


Chosen = States | Narrowing
"""What programs within a limit have in common: states' layouts, or what a family allows."""
Fastest = Callable[[JointGraph, Chosen | None, int | None, int, Deadline], Found]
"""The fastest plan of a graph, of those that are chosen, within a limit less a reserve."""


@dataclass(frozen=True)
class Way:
    """One set of collectives. fastest: the plans that it gives; offer: states, from the fastest plan of all."""

    fastest: Fastest
    offer: Callable[[Found], OfferedStates]


@dataclass(frozen=True)
class Program:
    """A plan lowered with so much in transfers at once. phases: seconds of each. over: bytes by which it is over the
    limit, with what it needs besides. held: at each op."""

    phases: Sequence[float]
    over: int
    held: Held

    def price(self, worth: float) -> float:
        """Seconds that it would take within the limit, where a byte is worth so many."""
        return sum(self.phases) + worth * max(0, self.over)


@dataclass
class Correcting:
    """The search counts other bytes and seconds than a program has, by what differs between plans. So states are chosen
    again and again, each time as the program of those before is.

    programs: of a plan, the ways in which it was lowered. needs: bytes of a plan, with what it needs besides. reserve:
    of `StatesWithin`. whole: the fastest plan. room: for the first states. faster: than this a plan has to be, in
    seconds. anyway: of `StatesWithin`. best: that fits. least: of those that do not. refused: why there were no states
    at first. judged: states of which there is a program. tight: as it is counted now, nothing fitted. plain: nothing
    fitted that is counted as the first program is, so what programs hold besides is left out. cut_short: the
    last states were found when their time was over. missing: bytes by which the program is over the limit that the next
    are counted as. bound: no states that are as they are counted now take less."""

    joint: JointGraph
    programs: Callable[[Found], Sequence[Program]]
    needs: Callable[[Found], int]
    reserve: Callable[[Found | None], int]
    way: Way
    whole: Found
    limit: int
    room: int
    faster: float
    anyway: list[Found]
    deadline: Deadline
    best: Found | None = None
    least: Found | None = None
    refused: InfeasibleError | None = None
    judged: list[States] = field(default_factory=list)
    tight: bool = False
    plain: bool = False
    cut_short: bool = False
    missing: int = 0
    bound: float = 0.0

    @cached_property
    def offered(self) -> OfferedStates:
        return self.way.offer(self.whole)

    def run(self) -> Found | None:
        """None: by the bound none is as fast as is asked for."""
        try:
            self._corrected()
        except InfeasibleError as reason:
            if not self.judged:
                self.refused = self.refused or reason
        if self.best is None and self.bound >= self.faster:
            return None
        if self.best is None and self.faster == math.inf:
            self._smallest()
        if self.best is None:
            raise self.refused or too_much(self.limit, self.least or self.whole)
        return self.best

    def _corrected(self) -> None:
        """First roughly, to see what programs hold."""
        room = self.room
        # What the pieces in flight keep is counted with the step, and another plan keeps less of it.
        if room <= 0 or self.joint.in_flight > 1:
            room = self.limit - self.reserve(None)
        patience, less, over = _PATIENCE, 0, 0
        for number in range(_ROUNDS):
            before = self._seconds
            try:
                rough = number == 0 or (self.plain and self.best is None)
                found = self._round(room - less, ROUGH if rough else ENOUGH)
            except NoStates:
                if self.plain or not self._is_unmet:
                    raise
                # What one program holds besides, others may not: the room is less by what was over it.
                self.plain, less = True, max(over, 0) + int(_LESS * self.limit)
                self.offered.forget_held()
                continue
            if self._seconds < math.inf:
                patience = _PATIENCE if self._seconds < before * (1.0 - _WORTH) else patience - 1
            again = found is None and self.best is None and less > 0 and self.bound < self.faster
            if not patience or (found is None and not again):
                return
            # Counted as a program is, these fitted, and their own program, the fastest with room for it, does not.
            over = 0 if found is None else self.missing
            if number > 0 and (over > 0 or self.best is None):
                less += max(over, int(_LESS * self.limit))
            elif over <= 0 and not self.plain:
                less //= 2  # it fits as it is counted
            if found is not None:
                room = self.limit - self.reserve(found)

    @property
    def _is_unmet(self) -> bool:
        """Whether there are programs, and none that fits."""
        return bool(self.judged) and self.best is None

    @property
    def _seconds(self) -> float:
        return math.inf if self.best is None else self.best.seconds

    def _round(self, room: int, gap: float) -> Found | None:
        """The plan of states for a room, by which others are counted from then on; None: there are none worth it."""
        # Where no states fit as counted: share by which the next room is larger than the least that any
        # need, and than the room before; and the largest, of the limit.
        furthest = 1.5 * self.limit if self.best is None else 0.0
        states = self._states(self.offered, room, furthest, gap)
        if gap > ENOUGH and states.seconds >= self.faster:
            states = self._states(self.offered, room, furthest, ENOUGH)
        self.bound = states.lower_bound
        wanted = min(self.faster, self._seconds * (1.0 - _WORTH))
        hopeless = self.bound >= wanted or (self.best is not None and states.seconds >= wanted)
        if hopeless or any(states.are(one) for one in self.judged):
            return None
        found = self._judged(states)
        if found is not None:
            self._take(found)
            program = self._closest(found, states)
            self.missing = program.over
            plain = self.plain and self.best is None
            self.offered.correct(states, program.phases, () if plain else program.held)
        return found

    def _states(self, offered: OfferedStates, room: int, furthest: float, gap: float) -> States:
        """Where there are none, of the least room that has some, up to the furthest: rows may count more than a program
        holds."""
        limit, self.tight = (self.limit, self.reserve(None)), False
        counted = offered is self.offered and self._is_unmet  # as a program is
        further = self.plain or not counted
        while True:
            # Share of the time left in which states must be chosen, each time.
            latest = self.deadline.share(0.5)
            try:
                states = offered.find(
                    room=room, limit=limit, deadline=latest, gap=gap, known=self.faster, further=further
                )
                self.cut_short = latest.left <= 0.0
                return states
            except NoStates as refused:
                if not self.judged:
                    self.refused = self.refused or refused
                larger = max(int(refused.least * (1.0 + 1e-3)), int(room * 1.05) if self.tight else 0)
                if counted or not room < larger <= furthest:
                    raise
                room, self.tight = larger, True

    def _take(self, found: Found) -> None:
        for one in (found, *found.rivals):
            if self.needs(one) > self.limit:
                if self.least is None or one.peak_nbytes < self.least.peak_nbytes:
                    self.least = one
            elif self.best is None or one.seconds < self.best.seconds:
                self.best = one

    def _closest(self, found: Found, states: States) -> Program:
        """By which states are counted next: the one that would be the fastest if what it is over the limit were made
        room for; where nothing fits, or all are far over it, the one that is over it least."""
        # Share of the limit over which a byte is worth what it is at the limit.
        near = [one for one in self.programs(found) if one.over <= 0.1 * self.limit]
        if self.tight or not near:
            return min(self.programs(found), key=lambda one: one.over)
        return min(near, key=lambda one: one.price(states.worth))

    def _judged(self, states: States) -> Found | None:
        """Its fastest program, that fits if one does; None where there was no time for it, and there is a better one
        than none."""
        self.judged.append(states)
        graph = compute_again(self.joint, states.again)
        try:
            return self.way.fastest(graph, states, None, 0, self.deadline)
        except (InfeasibleError, OutOfTime):
            if self.best is None:
                raise
            return None

    def _smallest(self) -> None:
        """Of the least room that has states, looked for anew: what an error of a smaller limit says would fit does
        fit."""
        with suppress(InfeasibleError):
            found = self._judged(self._states(self.way.offer(self.whole), 0, math.inf, ROUGH))
            assert found is not None
            self._take(found)
            if self.best is None and not self.cut_short:
                self.anyway += [found, *found.rivals]
