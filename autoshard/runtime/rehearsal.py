"""A refined plan's program runs for a few real steps before the first: what its prices leave out is in them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.plan import AnyPlan
from autoshard.plan.rehearsed_plan import rehearsed_plan
from autoshard.refine.refining_time import is_worth_it
from autoshard.runtime.agreement import everyones
from autoshard.runtime.busy_clock import BusyClock
from autoshard.runtime.making import Made
from autoshard.runtime.observe import unobserved
from autoshard.runtime.programs import AnyProgram
from autoshard.runtime.race_entry import RaceEntry
from autoshard.runtime.stage_clock import StageClock
from autoshard.runtime.track import WARM_STEPS, Track, steps_within
from passes.ir.kept_random_state import random_state_kept

__all__ = ["Entered", "by_speed", "is_to_rehearse", "rehearsed", "step_seconds"]

Entered = Callable[[AnyPlan, AnyProgram], RaceEntry]
"""A plan and its program -> both on copies of what a training step reads and writes."""

_NAME = "the plan"
_LEAST_STEPS = 3
_MOST_SHARE = 0.1
"""Of the time limit, that a rehearsal may take as it is predicted."""
_MARGIN = 1.25
"""Room that there must be, over the plan's peak: a rehearsal is no reason to fail."""


def is_to_rehearse(plan: AnyPlan, time_limit: float) -> bool:
    """Not rehearsed before, of steps that are short beside what planning may take, and worth it: under prices that were
    timed, or would have been if there had been time for it."""
    seconds = (WARM_STEPS + _LEAST_STEPS) * plan.step_time
    worth = bool(plan.origin.timed) or is_worth_it(plan.step_time)
    return worth and plan.rehearsed is None and seconds <= _MOST_SHARE * time_limit


def rehearsed(
    mesh: DeviceMesh,
    plan: AnyPlan,
    made: Made,
    entered: Entered,
    backend: str,
    watching: Sequence[list[Any]],
    clocks: list[StageClock],
) -> tuple[AnyPlan, Made]:
    """`plan` with its step as measured on copies, and what gives its program; as they were where there is no room.

    All ranks together. made, entered, watching: as of `autoshard.runtime.race.race`. clocks: of the stages, one of
    `watching`.
    """
    track = Track(mesh, "a rehearsal")
    # A limit is the plan's, which keeps it here as later; beside it is the model as it was given.
    if track.room(None) < _MARGIN * plan.peak_memory:
        return plan, made
    with unobserved(*watching), random_state_kept():
        program = made(backend)
        entry = entered(plan, program)
        mine = _steps(track, entry, clocks) if track.copied(_NAME, entry) else []
        entry.free()
    times = everyones(mesh, mine, what="times of a rehearsal")
    return (_as_measured(plan, times) if all(times) else plan), lambda backend: program


_Step = tuple[float, float | None]
"""Seconds of a step on a rank, and those in which its stages and the update computed; None: it has none, or they cannot
be told."""


def _steps(track: Track, entry: RaceEntry, clocks: list[StageClock]) -> list[_Step]:
    count = steps_within(track.warm(_NAME, entry), _LEAST_STEPS)
    clock, steps = BusyClock(), list[_Step]()
    # Work of GPUs goes on when its call has returned.
    with _also(clocks, [clock] if track.device_type == "cpu" else []):
        for _ in range(count):
            seconds = track.step(_NAME, entry)
            steps.append((seconds, None if clock.busy is None else clock.busy + entry.updating))
    return steps


@contextmanager
def _also(clocks: list[StageClock], more: Sequence[StageClock]) -> Generator[None]:
    clocks += more
    try:
        yield
    finally:
        del clocks[len(clocks) - len(more) :]


def _as_measured(plan: AnyPlan, times: Sequence[Sequence[_Step]]) -> AnyPlan:
    """times: by rank."""
    seconds = step_seconds([[[step for step, _ in steps]] for steps in times])[0]
    computed = [[busy for _, busy in steps if busy is not None] for steps in times]
    if not all(computed):
        return rehearsed_plan(plan, seconds)
    busy = statistics.mean(map(statistics.median, computed)) / seconds
    return rehearsed_plan(plan, seconds, min(1.0, busy))


def step_seconds(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """times[rank][plan][step] -> by plan, the median step of its slowest rank, seconds."""
    return [max(statistics.median(steps) for steps in of_plan) for of_plan in zip(*times, strict=True)]


def by_speed(seconds: Sequence[float]) -> list[int]:
    """Positions, the fastest first; of equals the one that was predicted to be faster, which comes first."""
    return sorted(range(len(seconds)), key=lambda i: (seconds[i], i))
