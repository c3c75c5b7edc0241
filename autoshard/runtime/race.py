"""A last word by the clock: the best plans run for a few real steps, and the fastest is kept.

All ranks come here together. What is local may fail on one rank, and then fails on all; in a step, where ranks wait for
each other, a rank that fails ends the others (`agreement.in_company`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.candidates import Candidate
from autoshard.plan.explain_tables import race_lines
from autoshard.plan.plan import AnyPlan
from autoshard.plan.plan_origin import Raced
from autoshard.plan.plan_words import plan_words
from autoshard.progress import tell
from autoshard.runtime.agreement import everyones, from_first
from autoshard.runtime.observe import unobserved
from autoshard.runtime.programs import AnyProgram
from autoshard.runtime.race_entry import RaceEntry
from autoshard.runtime.rehearsal import by_speed, step_seconds
from autoshard.runtime.settings import Settings
from autoshard.runtime.track import Track, steps_within
from cost_model.errors import RankError
from cost_model.units import format_bytes
from passes.ir.kept_random_state import random_state_kept

__all__ = ["Starter", "beside_each_other", "race", "rounds_within"]

_LEAST_ROUNDS = 5

_log = logging.getLogger("autoshard")

Times = list[list[float]]
"""By plan, seconds of each step on this rank."""


@dataclass(frozen=True)
class Starter:
    """entry: of a candidate on this rank."""

    candidate: Candidate
    entry: RaceEntry

    @property
    def program(self) -> AnyProgram:
        return self.entry.program


def race(
    mesh: DeviceMesh,
    candidates: Sequence[Candidate],
    made: Callable[[AnyPlan], Callable[[str], AnyProgram]],
    entered: Callable[[AnyPlan, AnyProgram], RaceEntry],
    settings: Settings,
    watching: Sequence[list[Any]],
) -> tuple[AnyPlan, Callable[[str], AnyProgram]]:
    """The plan of the fastest, which says of the others how fast they were; and what gives its program for a backend.

    made: what compiles a plan's program, on all ranks together. entered: the plan on copies. The first candidate is the
    search's own, and what it raises is raised; another that cannot be compiled or has no memory for its copies is left
    out, on all ranks. Of one candidate there is no race. watching: lists of observers, who see nothing of it.
    """
    if len(candidates) == 1:
        return candidates[0].plan, made(candidates[0].plan)

    def compiled(plan: AnyPlan) -> RaceEntry:
        return entered(plan, made(plan)(settings.backend))

    with unobserved(*watching), random_state_kept():
        plan, program = _won(mesh, list(_starters(candidates, compiled)), settings.memory_limit)
    return plan, lambda backend: program


def _won(
    mesh: DeviceMesh, starters: Sequence[Starter], memory_limit: int | None
) -> tuple[AnyPlan, AnyProgram]:
    if len(starters) < 2:
        return starters[0].candidate.plan, starters[0].program
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
        return starters[0].candidate.plan, starters[0].program
    times = everyones(mesh, mine, what="times of a race")
    order, seconds = from_first(mesh, lambda: _ranking(times), what="who won the race")
    won = kept[order[0]]
    result = tuple(_raced(kept[i].candidate, seconds[i]) for i in order)
    for line in race_lines(result):
        tell(mesh.get_rank(), line)
    return replace(won.candidate.plan, race=result), won.program


def beside_each_other(needs: Sequence[int], room: int) -> bool:
    """Whether plans of these peaks fit into `room` bytes together, so that their steps can take turns."""
    return sum(needs) <= room


def rounds_within(seconds: float) -> int:
    """How often plans run whose slowest takes `seconds` a step."""
    return steps_within(seconds, _LEAST_ROUNDS)


def _ranking(times: Sequence[Times]) -> tuple[list[int], list[float]]:
    seconds = step_seconds(times)
    return by_speed(seconds), seconds


def _raced(candidate: Candidate, seconds: float) -> Raced:
    plan = candidate.plan
    words = plan_words(plan)
    return Raced(candidate.name, words, plan.step_time, seconds)


def _starters(candidates: Sequence[Candidate], entered: Callable[[AnyPlan], RaceEntry]) -> Iterator[Starter]:
    for number, candidate in enumerate(candidates):
        try:
            entry = entered(candidate.plan)
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
    ready = [starter for starter in starters if track.copied(starter.candidate.name, starter.entry)]
    if ready[:1] != list(starters[:1]):
        return [], []
    rounds = rounds_within(max(track.warm(one.candidate.name, one.entry) for one in ready))
    times: Times = [[] for _ in ready]
    for number in range(rounds):
        places = range(len(ready))
        for place in places if number % 2 == 0 else reversed(places):
            times[place].append(track.step(ready[place].candidate.name, ready[place].entry))
    for starter in ready:
        starter.entry.free()
    return ready, times


def _one_by_one(track: Track, starters: Sequence[Starter]) -> tuple[list[Starter], Times]:
    """A A A B B B ..., with the copies of one at a time. Nothing where the first cannot run."""
    ready: list[Starter] = []
    times: Times = []
    for starter in starters:
        name, entry = starter.candidate.name, starter.entry
        if track.copied(name, entry):
            rounds = rounds_within(track.warm(name, entry))
            times.append([track.step(name, entry) for _ in range(rounds)])
            ready.append(starter)
        entry.free()
        gc.collect()
        if not ready:
            break
    return ready, times
