"""Who won a race of plans, by the clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["by_speed", "step_seconds"]


def step_seconds(times: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """times[rank][plan][step] -> by plan, the median step of its slowest rank, seconds."""
    return [max(statistics.median(steps) for steps in of_plan) for of_plan in zip(*times, strict=True)]


def by_speed(seconds: Sequence[float]) -> list[int]:
    """Positions, the fastest first; of equals the one that was predicted to be faster, which comes first."""
    return sorted(range(len(seconds)), key=lambda i: (seconds[i], i))
