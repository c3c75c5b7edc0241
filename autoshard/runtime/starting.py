"""From a kind of call to its programs: all before the first step, or at once, and the rest beside the steps; and
beside them too, once, what the layouts of the first plan lose at sizes far from its own.

The race, a last word by the clock: the best plans run for a few real steps, and the fastest is kept; one is rehearsed.
All ranks come here together. What is local may fail on one rank, and then fails on all; in a step, where ranks wait for
each other, a rank that fails ends the others (`agreement.in_company`).
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.crossovers import size_crossovers
from autoshard.plan.derived_plans import rehearsed_plan
from autoshard.plan.division import Division
from autoshard.plan.families import Again
from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import Candidate, cached_search, keep_plan
from autoshard.plan.plan_content import Raced
from autoshard.plan.plan_words import plan_words, race_lines
from autoshard.plan.task import CallLayouts, Task
from autoshard.progress import Say, tell, teller
from autoshard.refine.refine import Refined, refining
from autoshard.refine.time_work import TimedStore
from autoshard.refine.timed_cases import is_worth_it, refining_seconds
from autoshard.runtime.beside import TIMING_SHARE, Beside, Better, Search, Talk
from autoshard.runtime.call_program import CallProgram
from autoshard.runtime.making import Call, Made
from autoshard.runtime.module import Mode
from autoshard.runtime.observe import StageRecorder, unobserved
from autoshard.runtime.planner import Found, Planner, tuned_path
from autoshard.runtime.trial_run import WARM_STEPS, RaceEntry, Track, steps_within
from autoshard.runtime.tuning import TunedHome
from autoshard.watching.agreement import everyones, from_first
from cost_model.deadline import Deadline
from cost_model.errors import RankError, log
from cost_model.measure.clock import Marks
from cost_model.memory import format_bytes, format_seconds
from cost_model.timed import TimedPrices
from passes.capture import Captured
from passes.ir.process_state import random_state_kept
from passes.ir.size_names import Shapes, named_sizes, size_named

WORTH = 0.05
"""Share of a short step that a better plan must save for a search to go on beside it."""


def search_beside(planner: Planner, call: Call, first: Plan, store: TimedStore | None) -> Search | None:
    """What looks for a better plan of the call than `first` while that runs; None: no plan is worth it. The same on all
    ranks. store: of what is timed; None: nothing is."""
    s = planner.settings
    if first.gap <= s.gap and store is None:
        return None
    if first.gap < WORTH and not is_worth_it(first.step_time):
        seconds = format_seconds(first.step_time)
        tell(
            planner.mesh.get_rank(), f"tuning: no plan takes {WORTH:.0%} less than this one, {seconds} a step"
        )
        return None
    return Searching(planner.task(call.whole, call.layouts, s.pins), planner.division, first, store)


@dataclass(frozen=True)
class Searching:
    """Says which plans are better than `first`, and asks for times of kernels and collectives."""

    task: Task
    division: Division
    first: Plan
    store: TimedStore | None

    def __call__(self, talk: Talk) -> None:
        best = self.first
        for found, timed in self._found(talk):
            under = replace(self.task, timed=timed)
            # Share of a step that a plan must save for parameters to move to its layouts.
            if _seconds(found, under) < (1.0 - 0.02) * _seconds(best, under):
                best = found
                talk.send(Better(found.to_json()))
        keep_tuned(self.task, self.division, best)

    def _found(self, talk: Talk) -> Iterator[tuple[Plan, TimedPrices | None]]:
        """Plans, one after the other, and what was timed by then."""
        if self.store is None:
            yield self.division.fastest(self.task, Deadline.after(self.task.time_limit), cached_search), None
            return
        rounds = refining(self.task, self.division, self.store, budget=_budget)
        try:
            asked = next(rounds)
            while True:
                yield asked.plan, asked.timed
                talk.send(asked)
                asked = rounds.send(talk.recv())
        except StopIteration as end:
            yield end.value.plan, end.value.timed


def keep_tuned(task: Task, division: Division, plan: Plan) -> None:
    """For the next start."""
    if plan.micro_batches == plan.head_pieces == 1:
        keep_plan(tuned_path(task, division), plan)


def _budget(step_seconds: float, time_limit: float, nodes: int, backend: str) -> float:
    """Beside the steps it takes as many times as long as its share of them is small."""
    return refining_seconds(step_seconds, time_limit, nodes, backend) / TIMING_SHARE


def _seconds(plan: Plan, task: Task) -> float:
    cut = cut_call(task.captured, plan.micro_batches, plan.head_pieces)
    return replace(task, captured=cut).step_seconds(plan)


class StartingHome(TunedHome, Protocol):
    """plan: of the first kind of call; None: this is the first."""

    plan: Plan | None

    def planned(
        self, planner: Planner, captured: Captured, layouts: CallLayouts, refined: Refined | None
    ) -> Found: ...

    def tell_fallbacks(self, plan: Plan) -> None: ...

    def settle(self, plan: Plan) -> None: ...


class FarSizes:
    """Of one model: rank 0 looks.

    A size is far that is twice or half of the first call's; it is looked at again at four times, and so on, until a
    line was said. Not while programs are tuned, when prices and plans may still change."""

    def __init__(self, home: StartingHome) -> None:
        self._home = home
        self._first: tuple[Again, Hashable] | None = None
        """Of the first call: what its plan can be asked, and the mode of the model."""
        self._looked: set[tuple[str, int]] = set()
        self._beside: Beside | None = None
        self._ended = home.settings.tune != "background" or home.settings.plan is not None

    def seen(self, shapes: Shapes) -> None:
        """A kind of call of these shapes."""
        home, plan = self._home, self._home.plan
        if self._ended or plan is None or home.mesh.get_rank() != 0:
            return
        mode = Mode(home.model).key()
        if self._first is None:
            self._ended = plan.again is None or plan.again.carried is None
            self._first = None if plan.again is None else (plan.again, mode)
        elif mode == self._first[1] and self._is_free() and all(tuning.ended for tuning in home.tunings):
            self._look(plan, self._first[0], shapes)

    def _is_free(self) -> bool:
        if self._beside is not None:
            self._ended = self._ended or self._beside.news() is not None
        return not self._ended and (self._beside is None or self._beside.ended)

    def _look(self, plan: Plan, again: Again, shapes: Shapes) -> None:
        """Beside the steps, at the farthest size that was not looked at."""
        for name, size, doublings in _far(plan, again, shapes):
            if (name, doublings) not in self._looked:
                self._looked.add((name, doublings))
                self._beside = Beside(partial(_tell_far, plan, again, name, size, teller()))
                return


def _far(plan: Plan, again: Again, shapes: Shapes) -> Iterator[tuple[str, int, int]]:
    """(name, size, whole doublings or halvings), the farthest first; none where steps are too short to matter."""
    sizes = named_sizes(again.shapes, shapes)
    if not all((*sizes.values(), *itertools.chain(*again.shapes))):
        return
    found = [(name, size, size / size_named(again.shapes, name)) for name, size in sizes.items()]
    times = math.prod(ratio for _, _, ratio in found)
    for name, size, ratio in sorted(found, key=lambda one: -abs(math.log2(one[2]))):
        if (doublings := int(math.log2(ratio))) and is_worth_it(plan.step_time * times):
            yield name, size, doublings


def _tell_far(plan: Plan, again: Again, name: str, size: int, say: Say, talk: Talk) -> None:
    """What `plan` loses at this size of the call that it was found for, if anything is known."""
    now, carried = size_named(again.shapes, name), again.carried
    assert carried is not None
    for won in size_crossovers(plan, again, {name: (min(now, size), max(now, size))}):
        ours, other = (format_seconds(carried(one, {name: size}, None).step_time) for one in (plan, won.plan))
        side = "down" if size < now else "on"
        say(
            f"sizes: at {name} {size} the plan, found at {now}, takes {ours} a step, and another {other}, which wins "
            f"from {won.size} {side}, as predicted: there a new autoshard(...) of such a call pays ({won.words})"
        )
        talk.send(True)


_LEAST_ROUNDS = 5
_NAME, _LEAST_STEPS = "the plan", 3

Times = list[list[float]]
"""By plan, seconds of each step on this rank."""


@dataclass(frozen=True)
class Starter:
    """entry: of a candidate on this rank."""

    candidate: Candidate
    entry: RaceEntry

    @property
    def name(self) -> str:
        return self.candidate.name


def race(call: Call, candidates: Sequence[Candidate]) -> tuple[Plan, Made]:
    """The plan of the fastest, which says of the others how fast they were; and what gives its program for a backend.

    The first candidate is the search's own, and what it raises is raised; another that cannot be compiled or has no
    memory for its copies is left out, on all ranks. Of one candidate there is no race.
    """
    if len(candidates) == 1:
        return candidates[0].plan, call.made(candidates[0].plan)
    home = call.home
    with unobserved(home.observers, home.stage_clocks), random_state_kept():
        plan, program = _won(home.mesh, list(_starters(call, candidates)), home.settings.memory_limit)
    return plan, lambda backend: program


def _won(mesh: DeviceMesh, starters: Sequence[Starter], memory_limit: int | None) -> tuple[Plan, CallProgram]:
    if len(starters) < 2:
        return starters[0].candidate.plan, starters[0].entry.program
    track = Track(mesh, "a race")
    needs = [starter.candidate.plan.peak_memory for starter in starters]
    room = track.room(memory_limit)
    if beside_each_other(needs, room):
        kept, mine = _in_turn(track, starters)
    else:
        tell(
            mesh.get_rank(),
            f"race: one plan after the other: beside each other they need {format_bytes(sum(needs))}, "
            f"and there are {format_bytes(room)}",
        )
        kept, mine = _one_by_one(track, starters)
    if len(kept) < 2:
        return starters[0].candidate.plan, starters[0].entry.program
    times = everyones(mesh, mine, what="times of a race")
    order, seconds = from_first(mesh, lambda: _ranking(times), what="who won the race")
    won = kept[order[0]]
    ranked = [(kept[i].candidate, seconds[i]) for i in order]
    result = tuple(Raced(one.name, plan_words(one.plan), one.plan.step_time, took) for one, took in ranked)
    for line in race_lines(result):
        tell(mesh.get_rank(), line)
    return replace(won.candidate.plan, race=result), won.entry.program


def beside_each_other(needs: Sequence[int], room: int) -> bool:
    """Whether plans of these peaks fit into `room` bytes together, so that their steps can take turns."""
    return sum(needs) <= room


def rounds_within(seconds: float) -> int:
    """The number of steps of each plan, where the slowest takes `seconds` a step."""
    return steps_within(seconds, _LEAST_ROUNDS)


def step_seconds(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """times[rank][plan][step] -> by plan, the median step of its slowest rank, seconds."""
    return [max(statistics.median(steps) for steps in of_plan) for of_plan in zip(*times, strict=True)]


def by_speed(seconds: Sequence[float]) -> list[int]:
    """Positions, the fastest first; of equals the one that was predicted to be faster, which comes first."""
    return sorted(range(len(seconds)), key=lambda i: (seconds[i], i))


def _ranking(times: Sequence[Times]) -> tuple[list[int], list[float]]:
    seconds = step_seconds(times)
    return by_speed(seconds), seconds


def _starters(call: Call, candidates: Sequence[Candidate]) -> Iterator[Starter]:
    for number, candidate in enumerate(candidates):
        plan = candidate.plan
        try:
            entry = call.entry(plan, call.made(plan)(call.home.settings.backend))
        except RankError:
            raise
        except Exception as error:  # on all ranks
            if number == 0:
                raise
            log.warning("race: without %s, which cannot run: %s", candidate.name, error)
            continue
        yield Starter(candidate, entry)


def _in_turn(track: Track, starters: Sequence[Starter]) -> tuple[list[Starter], Times]:
    """A B C C B A ..., so that what else the machine does meets all alike. Nothing where the first cannot run."""
    ready = [starter for starter in starters if track.copied(starter.name, starter.entry)]
    if ready[:1] != list(starters[:1]):
        return [], []
    rounds = rounds_within(max(track.warm(one.name, one.entry) for one in ready))
    times: Times = [[] for _ in ready]
    for number in range(rounds):
        places = range(len(ready))
        for place in places if number % 2 == 0 else reversed(places):
            times[place].append(track.step(ready[place].name, ready[place].entry))
    for starter in ready:
        starter.entry.free()
    return ready, times


def _one_by_one(track: Track, starters: Sequence[Starter]) -> tuple[list[Starter], Times]:
    """A A A B B B ..., with the copies of one at a time. Nothing where the first cannot run."""
    ready: list[Starter] = []
    times: Times = []
    for starter in starters:
        seconds = track.alone(starter.name, starter.entry, _LEAST_ROUNDS)
        gc.collect()
        if seconds:
            ready.append(starter)
            times.append(seconds)
        if not ready:
            break
    return ready, times


def is_to_rehearse(plan: Plan, time_limit: float) -> bool:
    """Not rehearsed before, of steps that are short beside what planning may take, and worth it: under prices that were
    timed, or would have been if there had been time for it."""
    seconds = (WARM_STEPS + _LEAST_STEPS) * plan.step_time
    worth = bool(plan.origin.timed) or is_worth_it(plan.step_time)
    # A rehearsal may take a tenth of the time limit, as it is predicted.
    return worth and plan.rehearsed is None and seconds <= 0.1 * time_limit


def rehearsed(call: Call, plan: Plan, made: Made) -> tuple[Plan, Made]:
    """`plan` with its step as measured on copies, and what gives its program; as they were where there is no room.

    A refined plan's program runs for a few real steps before the first: what its prices leave out is in them.
    """
    home, track = call.home, Track(call.home.mesh, "a rehearsal")
    # A limit is the plan's, which keeps it here as later; beside it is the model as it was given.
    # Some room beyond the plan's peak: a rehearsal is no reason to fail.
    if track.room(None) < 1.25 * plan.peak_memory:
        return plan, made
    with unobserved(home.observers, home.stage_clocks), random_state_kept():
        program = made(home.settings.backend)
        entry, recorder = call.entry(plan, program), StageRecorder(Marks())
        if track.device_type == "cpu":  # work of GPUs goes on when its call has returned
            home.stage_clocks.append(recorder)
        seconds = track.alone(_NAME, entry, _LEAST_STEPS)
    busy = [step.busy + update for step, update in zip(recorder.steps(), entry.updates, strict=False)]
    mine = seconds, busy[-len(seconds) :]
    times = everyones(home.mesh, mine, what="times of a rehearsal")
    measured = all(steps for steps, _ in times)
    return (_as_measured(plan, times) if measured else plan), lambda backend: program


_Steps = tuple[Sequence[float], Sequence[float]]
"""Seconds of each step on a rank, and those in which its stages and the update computed; none where it has no stages,
or they cannot be told."""


def _as_measured(plan: Plan, ranks: Sequence[_Steps]) -> Plan:
    seconds = step_seconds([[steps] for steps, _ in ranks])[0]
    if not all(busy for _, busy in ranks):
        return rehearsed_plan(plan, seconds)
    busy = statistics.mean(statistics.median(own) for _, own in ranks) / seconds
    return rehearsed_plan(plan, seconds, min(1.0, busy))
