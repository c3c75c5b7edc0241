"""States are counted as their programs are: against programs that hold and take other than what was counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.plan.correcting import Program, Way
from autoshard.plan.search_with_states import StatesWithin
from autoshard.planning import canonical_capture
from cost_model.deadline import NEVER, Deadline, OutOfTime
from cost_model.errors import InfeasibleError
from passes.ir.joint import JointGraph
from passes.search.find import Found
from passes.search.find_states import NoStates, States
from passes.search.search_terms import Narrowing

LIMIT = 1000


@dataclass
class Machine:
    """The more bytes states are counted as, the less they take. holds: bytes of the program of states that were counted
    as so many. whole: of the fastest of all. least: said to be needed; enough: needed, as counted. slower: how many
    times what was counted programs take. counted: in which states were looked for, less what their programs hold
    besides."""

    holds: Callable[[int], int]
    least: int
    enough: int
    slower: float = 1.0
    besides: int = 0
    corrected: float = 1.0
    whole: int = 3 * LIMIT
    counted: list[int] = field(default_factory=list[int])
    programs: int = 0

    def find(
        self,
        *,
        room: int,
        limit: tuple[int, int],
        deadline: Deadline,
        gap: float,
        known: float = math.inf,
        further: bool = True,
    ) -> States:
        counted = room - self.besides
        self.counted.append(counted)
        if counted < self.enough:
            raise NoStates("no states", self.least + self.besides)
        seconds = 100.0 / counted * self.corrected
        return States((str(counted),), {}, seconds=seconds, lower_bound=seconds, nbytes=counted)

    def correct(self, states: States, phases: Sequence[float], held: Sequence[tuple[str, int]]) -> None:
        self.besides, self.corrected = (held[0][1] - states.nbytes if held else 0), self.slower

    def forget_held(self) -> None:
        self.besides = 0

    def fastest(
        self, joint: JointGraph, states: Any, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        held = self.whole if states is None else self.holds(states.nbytes)
        seconds = 0.01 if states is None else 100.0 / states.nbytes * self.slower
        self.programs += states is not None
        step: Any = None
        return Found({}, seconds, seconds, 0.0, "optimal", held, "x", step, ())


def _programs(found: Found) -> list[Program]:
    return [Program((found.seconds,), found.peak_nbytes - LIMIT, [("x", found.peak_nbytes)])]


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    return canonical_capture(nn.Linear(2, 2), (torch.randn(2, 2),), {}).joint


def _planned(machine: Machine, joint: JointGraph) -> Found:
    return searching(machine, joint).found(LIMIT, NEVER)


def searching(machine: Machine, joint: JointGraph) -> StatesWithin:
    return StatesWithin(joint, (_way(machine), _never()), lambda found: 0, lambda found: 0, _programs)


def _way(machine: Machine) -> Way:
    offer: Any = lambda whole: replace(machine, besides=0, corrected=1.0)
    return Way(machine.fastest, offer)


def _never() -> Way:
    def unasked(*_: object) -> Any:
        raise AssertionError("plans without messages are no matter where messages take no memory")

    return Way(unasked, unasked)


@dataclass
class Refusing(Machine):
    """Has no states where programs are counted to hold far more than they were."""

    refused: list[int] = field(default_factory=list[int])

    def find(self, **given: Any) -> States:
        if self.besides >= 500:
            self.refused.append(self.besides)
            raise NoStates("no states", given["room"] + 1)
        return super().find(**given)


def test_where_nothing_fits_that_is_counted_as_a_program_is_the_room_is_less(joint: JointGraph) -> None:
    """The first program holds 600 bytes more than was counted; others hold fewer."""
    machine = Refusing(lambda counted: counted + (600 if counted > 400 else 100), least=300, enough=100)
    found = _planned(machine, joint)
    assert machine.refused == [600] and machine.counted[1] == 380
    assert found.peak_nbytes <= LIMIT


def test_where_no_room_does_it_says_so_and_ends(joint: JointGraph) -> None:
    machine = Machine(lambda counted: 1100 + counted, least=300, enough=500)
    # That there were no states for less than the limit leaves says nothing of the limit.
    with pytest.raises(InfeasibleError, match="the smallest that was found holds"):
        _planned(machine, joint)
    assert len(machine.counted) <= 30


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
    found = StatesWithin(joint, ways, reserve, reserve, _programs).found(LIMIT, NEVER)
    assert (found.seconds, found.peak_nbytes, found.status) == (1.04, 950, "feasible")
    assert found.lower_bound == 1.0 and found.gap == pytest.approx(0.04 / 1.04)


def test_a_way_that_can_save_too_little_is_not_searched(joint: JointGraph) -> None:
    first = _whole(1.0, 900)
    ways = Way(first.fastest, _never().offer), _whole(1.005, 950)
    reserve = lambda found: 300 if found is not None and found.seconds == 1.0 else 0
    found = StatesWithin(joint, ways, reserve, reserve, _programs).found(LIMIT, NEVER)
    assert (found.seconds, found.lower_bound) == (1.005, 1.0)


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
    within = StatesWithin(joint, (_way(machine), _never()), none, none, _programs, families=held)
    found = within.found(LIMIT, NEVER)
    assert found.seconds == pytest.approx(seconds)
    assert found.lower_bound == 0.01, "of all plans, without a limit"


def test_a_family_is_taken_where_no_states_are_found(joint: JointGraph) -> None:
    machine = Families(lambda counted: counted, least=LIMIT, enough=2 * LIMIT)
    none = lambda found: 0
    within = StatesWithin(joint, (_way(machine), _never()), none, none, _programs, families=(Held(7.0, 900),))
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
    within = StatesWithin(
        joint, (_way(machine), _never()), none, none, _programs, families=(Held(7.0, 1001),)
    )
    found = within.found(LIMIT, NEVER)
    assert (found.seconds, found.peak_nbytes) == (8.0, 801)


def test_what_a_program_holds_besides_is_left_for_it(joint: JointGraph) -> None:
    """300 bytes: the program of 1000 is over by them. That of 700 fits, and nothing is faster as it is counted then."""
    machine = Machine(lambda counted: counted + 300, least=300, enough=300)
    found = _planned(machine, joint)
    assert found.peak_nbytes == LIMIT and found.seconds == pytest.approx(100.0 / 700)
    assert machine.programs == 2


def test_where_rows_count_more_than_programs_hold_more_is_kept(joint: JointGraph) -> None:
    machine = Machine(lambda counted: counted - 300, least=300, enough=300)
    found = _planned(machine, joint)
    assert found.peak_nbytes == LIMIT and found.seconds == pytest.approx(100.0 / 1300)


def test_states_that_rows_have_no_room_for_may_fit(joint: JointGraph) -> None:
    """Any states are counted as 1200 bytes, and those hold 600."""
    machine = Machine(lambda counted: counted // 2, least=1200, enough=1200)
    assert _planned(machine, joint).peak_nbytes <= LIMIT


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_the_bound_is_of_plans_without_a_limit(joint: JointGraph, slower: float) -> None:
    """States of 1000 bytes are counted as 0.1 s. Others may be counted as more bytes than their program holds: the plan
    of 0.01 s that does not fit is all that is known of programs."""
    machine = Machine(lambda counted: counted, least=300, enough=300, slower=slower)
    found = _planned(machine, joint)
    assert found.seconds == pytest.approx(0.1 * slower)
    assert (found.lower_bound, found.status) == (0.01, "feasible")
    assert machine.programs == 1, "counted as its program is, it is the fastest"


def test_states_that_are_no_faster_than_a_plan_that_fits_have_no_program(joint: JointGraph) -> None:
    """Without messages 0.12 s. With them, by hand: 700 bytes are left, in which states take 0.143 s."""
    machine = Machine(lambda counted: pytest.fail("a program"), least=300, enough=600, whole=3 * LIMIT // 2)
    reserve = lambda found: 300 if found is not None and found.seconds == 0.01 else 0
    ways = _way(machine), _whole(0.12, 950)
    found = StatesWithin(joint, ways, reserve, reserve, _programs).found(LIMIT, NEVER)
    assert (found.seconds, found.lower_bound) == (0.12, 0.01)


@dataclass
class Interrupted(Machine):
    """There is no time to judge a second program."""

    def fastest(
        self, joint: JointGraph, states: States | None, limit: int | None, reserve: int, deadline: Deadline
    ) -> Found:
        if states is not None and self.programs:
            raise OutOfTime
        return super().fastest(joint, states, limit, reserve, deadline)


def test_what_was_found_is_kept_where_time_ends_over_a_better_one(joint: JointGraph) -> None:
    """The first program fits and leaves 300 bytes."""
    found = _planned(Interrupted(lambda counted: counted - 300, least=300, enough=600), joint)
    assert found.peak_nbytes == 700 and found.seconds == pytest.approx(0.1)


@pytest.mark.parametrize(("messages", "first"), [(100, "with"), (300, "without")])
def test_far_over_the_limit_nothing_is_searched_without_messages_either(
    joint: JointGraph, messages: int, first: str
) -> None:
    """Both ways start from one plan: what is fastest without a limit says little of what fits. The way without messages
    has the room that these would take, and is first where that is a fourth of the limit."""
    machine = Machine(lambda counted: counted, least=300, enough=500)
    offered = replace(machine)
    reserve = lambda found: messages if found is not None and found.seconds == 0.01 else 0

    def without(joint: JointGraph, states: States | None, *rest: Any) -> Found:
        assert states is not None, "plans without messages are no start of theirs"
        return machine.fastest(joint, states, *rest)

    ways = _way(machine), Way(without, lambda whole: offered)
    found = StatesWithin(joint, ways, reserve, reserve, _programs).found(LIMIT, NEVER)
    own = {"with": machine, "without": offered}[first]
    assert own.counted[0] == LIMIT - (messages if first == "with" else 0)
    assert found.peak_nbytes == LIMIT


@dataclass
class Cliff(Machine):
    """What does not fit does with less in transfers at once, and takes ten times as long."""

    def fastest(self, joint: JointGraph, states: Any, *rest: Any) -> Found:
        found = super().fastest(joint, states, *rest)
        if states is None or found.peak_nbytes <= LIMIT:
            return found
        return replace(
            found, seconds=10.0 * found.seconds, peak_nbytes=LIMIT - 1, peak_node=str(found.peak_nbytes)
        )


def test_room_is_less_by_what_the_program_lacks_that_states_are_counted_as(joint: JointGraph) -> None:
    """Each is over the limit by 20 bytes as it is counted, and a slow program of it fits."""
    machine = Cliff(
        lambda counted: counted + (30 if counted == LIMIT else 50 if counted > 960 else 70),
        least=300,
        enough=500,
    )

    def both(found: Found) -> list[Program]:
        if not found.peak_node.isdigit():
            return _programs(found)
        held = int(found.peak_node)
        fast = Program((found.seconds / 10.0,), held - LIMIT, [("x", held)])
        return [fast, Program((found.seconds,), -1, [("x", LIMIT - 1)])]

    found = StatesWithin(joint, (_way(machine), _never()), lambda found: 0, lambda found: 0, both).found(
        LIMIT, NEVER
    )
    assert found.peak_nbytes == LIMIT and found.seconds == pytest.approx(100.0 / 930)


def test_where_a_program_fits_more_room_is_tried_again(joint: JointGraph) -> None:
    """Of the third states the program holds 25 bytes more than they are counted, of the second 50."""
    holds = {1000: 1030, 970: 1020, 930: 955}
    machine = Machine(lambda counted: holds.get(counted, counted + 20), least=300, enough=500)
    found = _planned(machine, joint)
    assert found.peak_nbytes == 995 and found.seconds == pytest.approx(100.0 / 975)
