"""Rooms in which states are chosen, until a program fits: against programs that hold other than what was counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.plan.judged import Spared
from autoshard.plan.rooms import Way
from autoshard.plan.search_with_states import StatesWithin
from autoshard.planning import canonical_capture
from cost_model.deadline import NEVER, Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.search.find import Found
from passes.search.find_states import NoStates, States
from passes.search.narrowing import Narrowing
from passes.search.step_kinds import PhaseOverlap

LIMIT = 1000


@dataclass
class Machine:
    """holds: bytes of the program of states that were counted as so many. least: said to be needed; enough: needed."""

    holds: Callable[[int], int]
    least: int
    enough: int
    rooms: list[int] = field(default_factory=list[int])

    def find(
        self, *, room: int, limit: tuple[int, int], deadline: Deadline, prove: bool, known: float = math.inf
    ) -> States:
        self.rooms.append(room)
        if room < self.enough:
            raise NoStates("no states", self.least)
        seconds = 100.0 / room
        return States((), {}, seconds=seconds, lower_bound=seconds, nbytes=room, room=room)

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        held = 3 * LIMIT if states is None else self.holds(states.nbytes)
        seconds = 0.01 if states is None else states.seconds
        step: Any = None
        return Found({}, seconds, seconds, 0.0, "optimal", held, "x", step, ())


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    return canonical_capture(nn.Linear(2, 2), (torch.randn(2, 2),), {}).joint


def _planned(machine: Machine, joint: JointGraph) -> Found:
    return searching(machine, joint).found(LIMIT, NEVER)


def searching(machine: Machine, joint: JointGraph) -> StatesWithin:
    return StatesWithin(joint, (_way(machine), _never()), lambda found: 0, lambda found: 0)


def _way(machine: Machine) -> Way:
    offer: Any = lambda whole: machine
    return Way(machine.fastest, offer)


def _never() -> Way:
    def unasked(*_: object) -> Any:
        raise AssertionError("plans without messages are no matter where messages take no memory")

    return Way(unasked, unasked)


def test_a_room_between_what_is_too_little_and_what_is_too_much(joint: JointGraph) -> None:
    """The program of 1000 holds 1900: less 1.25 times what that is too much there is nothing left. By hand: halfway to
    1000 is too little, and 300 are needed; halfway from 300 it holds 976, which leaves less than another room is
    worth."""
    machine = Machine(lambda counted: 1900 - int(2.64 * (1000 - counted)), least=300, enough=600)
    found = _planned(machine, joint)
    assert found.peak_nbytes == 976 and found.seconds == pytest.approx(100.0 / 650)
    assert machine.rooms[:3] == [1000, 500, 650]


def test_where_no_room_does_it_says_so_and_ends(joint: JointGraph) -> None:
    machine = Machine(lambda counted: 1100 + counted, least=300, enough=500)
    # That there were no states for less than the limit leaves says nothing of the limit.
    with pytest.raises(InfeasibleError, match="the smallest that was found holds"):
        _planned(machine, joint)
    assert len(machine.rooms) <= 22


def _whole(seconds: float, nbytes: int) -> Way:
    """Whose fastest plan is this one. It has no states."""
    step: Any = None
    found = Found({}, seconds, seconds, 0.0, "optimal", nbytes, "x", step, ())

    def offer(whole: Found) -> Any:
        return Machine(lambda counted: counted, least=LIMIT, enough=2 * LIMIT)

    return Way(lambda *_: found, offer)


def test_messages_are_left_out_where_their_memory_is_worth_more(joint: JointGraph) -> None:
    """The fastest plan needs 300 bytes for messages and misses the limit by 200. Without them the fastest takes 4 %
    longer and fits. No states of the first were found, which is no proof that there are none."""
    reserve = lambda found: 300 if found is not None and found.seconds == 1.0 else 0
    ways = _whole(1.0, 900), _whole(1.04, 950)
    found = StatesWithin(joint, ways, reserve, reserve).found(LIMIT, NEVER)
    assert (found.seconds, found.peak_nbytes, found.status) == (1.04, 950, "feasible")
    assert found.lower_bound == 1.0 and found.gap == pytest.approx(0.04 / 1.04)


def test_a_way_that_can_save_too_little_is_not_searched(joint: JointGraph) -> None:
    first = _whole(1.0, 900)
    ways = Way(first.fastest, _never().offer), _whole(1.005, 950)
    reserve = lambda found: 300 if found is not None and found.seconds == 1.0 else 0
    found = StatesWithin(joint, ways, reserve, reserve).found(LIMIT, NEVER)
    assert (found.seconds, found.lower_bound) == (1.005, 1.0)


@dataclass
class Contradicted(Machine):
    """Other layouts, counted as 1 s, make a program of 3 s; those that hold 600 bytes take what was counted."""

    def find(
        self, *, room: int, limit: tuple[int, int], deadline: Deadline, prove: bool, known: float = math.inf
    ) -> States:
        self.rooms.append(room)
        seconds, nbytes = (1.0, 900) if prove and room >= 900 else (1.5 if prove else 2.0, 600)
        return States((), {}, seconds=seconds, lower_bound=seconds, nbytes=nbytes, room=room)

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        found = super().fastest(joint, states, limit, reserve, deadline)
        return replace(found, seconds=3.0 if states is not None and states.nbytes == 900 else found.seconds)


def test_where_a_program_contradicts_what_was_counted_a_smaller_room_is_proven(joint: JointGraph) -> None:
    """No room twice in the same way."""
    machine = Contradicted(lambda counted: counted, least=300, enough=600)
    found = _planned(machine, joint)
    assert machine.rooms == [1000, 1400, 1000, 600]
    assert found.seconds == 1.5


@dataclass
class Judged(Machine):
    """programs: how many were made of states, which are the same in any room, and of which nothing is proven."""

    programs: int = 0

    def find(
        self, *, room: int, limit: tuple[int, int], deadline: Deadline, prove: bool, known: float = math.inf
    ) -> States:
        self.rooms.append(room)
        return States((), {}, seconds=2.0, lower_bound=-math.inf, nbytes=600, room=room)

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        self.programs += states is not None
        return super().fastest(joint, states, limit, reserve, deadline)


def test_the_same_states_are_judged_once(joint: JointGraph) -> None:
    """600 of 1,000 bytes leave room for more; what is found there is the same. The fastest of all takes 0.01 s."""
    machine = Judged(lambda counted: counted, least=300, enough=600)
    found = _planned(machine, joint)
    assert (found.seconds, found.lower_bound) == (2.0, 0.01)
    assert machine.programs == 1 < len(machine.rooms)


@dataclass
class Crowded(Machine):
    """Above 900 bytes there is little left for transfers, which then take ten seconds more."""

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        found = super().fastest(joint, states, limit, reserve, deadline)
        return replace(found, seconds=found.seconds + 10.0 * (900 < found.peak_nbytes <= LIMIT))


def test_less_is_kept_where_transfers_gain_more_by_it(joint: JointGraph) -> None:
    """100 bytes are missing for them; 1.25 times as many are left the next time."""
    machine = Crowded(lambda counted: counted, least=300, enough=600)
    spared = lambda found: Spared(10.0, 100) if found.peak_nbytes > 900 else Spared()
    none = lambda found: 0
    found = StatesWithin(joint, (_way(machine), _never()), none, none, spared).found(LIMIT, NEVER)
    assert machine.rooms[:2] == [1000, 875]
    assert found.peak_nbytes == 875 and found.seconds == pytest.approx(100.0 / 875)


@dataclass
class Slower(Machine):
    """Every program takes so much longer than it was counted."""

    by: float = 0.0

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        found = super().fastest(joint, states, limit, reserve, deadline)
        return found if states is None else replace(found, seconds=found.seconds * (1.0 + self.by))


@pytest.mark.parametrize("by", [0.0, 0.005, 0.2])
def test_the_bound_is_of_plans_without_a_limit(joint: JointGraph, by: float) -> None:
    """States of 1000 bytes are counted as 0.1 s, and proven in that room. Others may be counted as more bytes than
    their program holds: the plan of 0.01 s that does not fit is all that is known of programs."""
    found = _planned(Slower(lambda counted: counted, least=300, enough=950, by=by), joint)
    assert found.seconds == pytest.approx(0.1 * (1.0 + by))
    assert (found.lower_bound, found.status) == (0.01, "feasible")


@dataclass
class Recounted(Slower):
    """As its program overlaps, states take so much longer than they were counted at first."""

    under_it: bool = False

    def under(self, overlaps: Sequence[PhaseOverlap]) -> None:
        assert overlaps == (PhaseOverlap(0.5),)
        self.under_it = True

    def find(
        self, *, room: int, limit: tuple[int, int], deadline: Deadline, prove: bool, known: float = math.inf
    ) -> States:
        found = super().find(room=room, limit=limit, deadline=deadline, prove=prove)
        taken = found.seconds * (1.0 + self.by * self.under_it)
        return replace(found, seconds=taken, lower_bound=0.99 * taken)

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        found = super().fastest(joint, states, limit, reserve, deadline)
        return found if states is None else replace(found, seconds=0.12, own=(PhaseOverlap(0.5),))


def test_states_are_counted_as_their_best_program_overlaps(joint: JointGraph) -> None:
    """By hand: 0.1 s are counted of 1000 bytes, and the program takes 0.12."""
    machine = Recounted(lambda counted: counted, least=300, enough=950, by=0.2)
    found = _planned(machine, joint)
    assert machine.under_it
    assert found.seconds == pytest.approx(0.12)


def test_states_that_are_no_faster_than_a_plan_that_fits_are_not_looked_for(joint: JointGraph) -> None:
    """Without messages 0.12 s. With them, by hand: 700 bytes are left, in which states take 0.143 s, so that they do is
    proven, and no program is made of them."""
    machine = Machine(lambda counted: pytest.fail("a program"), least=300, enough=600)
    reserve = lambda found: 300 if found is not None and found.seconds == 0.01 else 0
    ways = _way(machine), _whole(0.12, 950)
    found = StatesWithin(joint, ways, reserve, reserve).found(LIMIT, NEVER)
    assert machine.rooms == [700, 700]
    assert (found.seconds, found.lower_bound) == (0.12, 0.01)


@dataclass(frozen=True)
class Held:
    """A family whose plan takes so long and holds so much."""

    seconds: float
    nbytes: int

    def narrowing(self, task: Narrowing) -> Narrowing:
        return task


@dataclass
class Families(Machine):
    """States whose program takes 0.1 s in 1000 bytes, and families."""

    def fastest(
        self, joint: JointGraph, states: Any, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        if not isinstance(states, Held):
            return super().fastest(joint, states, limit, reserve, deadline)
        step: Any = None
        return Found({}, states.seconds, 0.0, 1.0, "optimal", states.nbytes, "x", step, ())


@pytest.mark.parametrize(
    ("held", "seconds"),
    [((Held(0.05, 900),), 0.05), ((Held(0.05, 1001), Held(0.2, 10)), 0.1)],
    ids=["faster", "no"],
)
def test_a_family_that_fits_and_is_faster_is_taken(
    held: tuple[Held, ...], seconds: float, joint: JointGraph
) -> None:
    machine = Families(lambda counted: counted, least=300, enough=600)
    none = lambda found: 0
    within = StatesWithin(joint, (_way(machine), _never()), none, none, families=held)
    found = within.found(LIMIT, NEVER)
    assert found.seconds == pytest.approx(seconds)
    assert found.lower_bound == 0.01, "of all plans, without a limit"


def test_a_family_is_taken_where_no_states_are_found(joint: JointGraph) -> None:
    machine = Families(lambda counted: counted, least=LIMIT, enough=2 * LIMIT)
    none = lambda found: 0
    within = StatesWithin(joint, (_way(machine), _never()), none, none, families=(Held(7.0, 900),))
    found = within.found(LIMIT, NEVER)
    assert (found.seconds, found.lower_bound) == (7.0, 0.01), "the bound is of all plans, without a limit"


@dataclass
class Beside(Families):
    """A search of a family judges another plan, which holds less and takes a second more."""

    def fastest(
        self, joint: JointGraph, states: Any, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        found = super().fastest(joint, states, limit, reserve, deadline)
        other = replace(found, seconds=found.seconds + 1.0, peak_nbytes=found.peak_nbytes - 200)
        return replace(found, rivals=(other,)) if isinstance(states, Held) else found


def test_what_fits_of_all_that_was_judged_is_taken(joint: JointGraph) -> None:
    """The family's plan is over the limit, and there are no states."""
    machine = Beside(lambda counted: counted, least=LIMIT, enough=2 * LIMIT)
    none = lambda found: 0
    within = StatesWithin(joint, (_way(machine), _never()), none, none, families=(Held(7.0, 1001),))
    found = within.found(LIMIT, NEVER)
    assert (found.seconds, found.peak_nbytes) == (8.0, 801)


@dataclass
class _Wide(Machine):
    """Other layouts hold a third; those as they are known what they hold in any room but the smallest."""

    def find(
        self, *, room: int, limit: tuple[int, int], deadline: Deadline, prove: bool, known: float = math.inf
    ) -> States:
        found = super().find(room=room, limit=limit, deadline=deadline, prove=prove)
        return replace(found, nbytes=room // 4) if prove else found


def test_where_smaller_rooms_leave_the_program_as_it_is_other_layouts_are_tried(joint: JointGraph) -> None:
    """By hand: 1200 in each room, 1.25 times 200 less each time; twice it held as much as before."""
    machine = _Wide(lambda counted: 1200 if counted > 260 else 900, least=0, enough=0)
    assert _planned(machine, joint).peak_nbytes == 900
    assert machine.rooms[:4] == [1000, 750, 500, 1000]


def test_rooms_are_tried_to_the_end_where_other_layouts_do_not_help(joint: JointGraph) -> None:
    """Of known layouts the first rooms, of others all of them, and at last the smaller ones of known layouts."""
    machine = _Refusing(lambda counted: 1200 if counted > 260 else 900, least=0, enough=0)
    assert _planned(machine, joint).peak_nbytes == 900
    assert machine.rooms[:7] == [1000, 750, 500, 1000, 750, 500, 250]
    assert machine.rooms.count(250) > 1


@dataclass
class _Refusing(Machine):
    """Programs of other layouts hold too much in every room."""

    def find(
        self, *, room: int, limit: tuple[int, int], deadline: Deadline, prove: bool, known: float = math.inf
    ) -> States:
        found = super().find(room=room, limit=limit, deadline=deadline, prove=prove)
        return replace(found, nbytes=5 * LIMIT) if prove and self.refuses else found

    @property
    def refuses(self) -> bool:
        """As long as layouts that are known have not been tried again."""
        return self.rooms.count(250) < 3


@dataclass
class Interrupted(Crowded):
    """There is no time to judge a second program."""

    judged: int = 0

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        self.judged += states is not None
        if self.judged > 1:
            raise OutOfTime
        return super().fastest(joint, states, limit, reserve, deadline)


def test_what_was_found_is_kept_where_time_ends_over_a_better_one(joint: JointGraph) -> None:
    """The first program fits and takes 10.1 s; less would be kept for transfers, and nobody knows what that takes."""
    machine = Interrupted(lambda counted: counted, least=300, enough=600)
    spared = lambda found: Spared(10.0, 100) if found.peak_nbytes > 900 else Spared()
    none = lambda found: 0
    found = StatesWithin(joint, (_way(machine), _never()), none, none, spared).found(LIMIT, NEVER)
    assert machine.judged == 2
    assert found.peak_nbytes == LIMIT and found.seconds == pytest.approx(10.1)
