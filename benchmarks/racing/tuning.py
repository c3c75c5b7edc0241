"""The best setting of a way by hand, found by running all of them for a few steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.racing.by_hand import ByHand, setting_text
from benchmarks.racing.contestants import Race, Runner
from benchmarks.racing.measure import Taken, timed_rounds, warm_up

__all__ = ["Tuned", "best_setting", "tuned"]

TUNING_ROUNDS = 4


@dataclass(frozen=True)
class Tuned:
    """setting: the fastest's. losses: of its first steps. tried: setting -> median step, seconds."""

    runner: Runner
    setting: str
    losses: tuple[float, ...]
    tried: Mapping[str, float]


def tuned(by_hand: ByHand, race: Race, steps: int) -> Tuned:
    """All settings in turn, after `steps` to warm up. One that raises is left out, if another runs.

    Every rank gets the same answer: what is compared is of the slowest rank.
    """
    runners: dict[str, Runner] = {}
    losses: dict[str, tuple[float, ...]] = {}
    failure: Exception | None = None
    for setting in by_hand.settings(race):
        name = setting_text(setting)
        try:
            runner = by_hand.build(race, setting)
            losses[name] = tuple(warm_up(runner, steps))
            runners[name] = runner
        except Exception as error:
            failure = error
    if failure is not None and not runners:
        raise failure
    taken = timed_rounds(runners, TUNING_ROUNDS) if len(runners) > 1 else {}
    best = best_setting(taken) if taken else next(iter(runners))
    tried = {name: statistics.median(one.seconds) for name, one in taken.items()}
    return Tuned(runners[best], best, losses[best], tried)


def best_setting(taken: Mapping[str, Taken]) -> str:
    """Of the least median step."""
    return min(taken, key=lambda name: statistics.median(taken[name].seconds))
