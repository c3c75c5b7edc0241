"""A last word by the clock: the best plans run for a few real steps, and the fastest is kept; one is rehearsed.

All ranks come here together. What is local may fail on one rank, and then fails on all; in a step, where ranks wait for
each other, a rank that fails ends the others (`agreement.in_company`).
"""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.derived_plans import rehearsed_plan
from autoshard.plan.plan import Plan
from autoshard.plan.plan_cache import Candidate
from autoshard.plan.plan_content import Raced
from autoshard.plan.plan_words import plan_words, race_lines
from autoshard.progress import tell
from autoshard.refine.timed_cases import is_worth_it
from autoshard.runtime.call_program import CallProgram
from autoshard.runtime.making import Call, Made
from autoshard.runtime.observe import StageRecorder, unobserved
from autoshard.runtime.trial_run import WARM_STEPS, RaceEntry, Track, steps_within
from autoshard.watching.agreement import everyones, from_first
from cost_model.errors import RankError
from cost_model.measure.clock import Marks
from cost_model.memory import format_bytes
from passes.ir.process_state import random_state_kept

_LEAST_ROUNDS = 5
_NAME, _LEAST_STEPS = "the plan", 3

_log = logging.getLogger("autoshard")

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
            _log.warning("race: without %s, which cannot run: %s", candidate.name, error)
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
