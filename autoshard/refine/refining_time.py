"""How long refining a plan may take."""

from __future__ import annotations

__all__ = ["is_worth_it", "refining_seconds"]

STEPS_WORTH, MOST_SHARE, LEAST_SECONDS = 200, 0.25, 5.0
"""What refining may take: so many predicted steps, and this share of the time limit; less than the seconds is not
begun. What a faster plan saves must be worth the wait: training has many times as many steps, a test has not."""
START_SECONDS, NODE_SECONDS = 8.0, 0.04
"""What it may take at most for a graph without nodes, and for each of its nodes: searching and timing take as long as
there is to search and to time, whatever a busy machine predicts of a step."""

COMPILING_SECONDS = 2.0
"""More for programs that are compiled: the fused groups that are timed are, each in half a second on two cores."""


def is_worth_it(step_seconds: float) -> bool:
    """Whether steps take so long that what is learned of them matters."""
    return STEPS_WORTH * step_seconds >= LEAST_SECONDS


def refining_seconds(step_seconds: float, time_limit: float, nodes: int, backend: str = "eager") -> float:
    """The budget for a plan of that step, of a graph of so many nodes and for that backend; 0: not worth it."""
    most = START_SECONDS + NODE_SECONDS * nodes
    seconds = min(STEPS_WORTH * step_seconds, MOST_SHARE * time_limit, most)
    compiling = 0.0 if backend == "eager" else COMPILING_SECONDS
    return seconds + compiling if seconds >= LEAST_SECONDS else 0.0
