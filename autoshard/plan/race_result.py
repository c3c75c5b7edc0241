"""Who won a race of plans, by the clock, and what is said of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autoshard.plan.plan_content import Raced
from passes.plan.graph_text import format_seconds

__all__ = ["by_speed", "race_lines", "step_seconds"]


def step_seconds(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """times[rank][plan][step] -> by plan, the median step of its slowest rank, seconds."""
    return [max(statistics.median(steps) for steps in of_plan) for of_plan in zip(*times, strict=True)]


def by_speed(seconds: Sequence[float]) -> list[int]:
    """Positions, the fastest first; of equals the one that was predicted to be faster, which comes first."""
    return sorted(range(len(seconds)), key=lambda i: (seconds[i], i))


def race_lines(race: Sequence[Raced]) -> list[str]:
    """One line that says who won and by how much, and one for each plan. race: the fastest first; nothing if empty."""
    if not race:
        return []
    width = max(len(one.name) for one in race)
    head = f"raced, {len(race)} plans: {race[0].name} is kept, {format_seconds(race[0].measured)} a step"
    if len(race) > 1:
        gain = race[1].measured / race[0].measured - 1.0 if race[0].measured > 0.0 else 0.0
        head += f", {gain:.1%} faster than {race[1].name}"
    return [
        head,
        *(
            f"  {one.name:{width}}  measured {format_seconds(one.measured)}, "
            f"predicted {format_seconds(one.predicted)}: {one.words}"
            for one in race
        ),
    ]
