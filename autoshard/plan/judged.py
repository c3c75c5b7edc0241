"""An assignment of layouts, lowered, and its step on the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.plan.decide import decide
from passes.plan.planned_graph import Collective, PlannedGraph
from passes.predict.memory_kinds import KINDS
from passes.predict.memory_record import MemoryStep, MemoryWalk
from passes.predict.predict_step import Prediction, predicted_step
from passes.predict.step_in_orders import StepInOrders
from passes.strategies.prices import Prices


@dataclass(frozen=True)
class Spared:
    """What it costs a plan that a limit leaves little to transfers: seconds that it would be faster by with a part of
    what prices say, for which `missing` bytes are too few."""

    gained: float = 0.0
    missing: int = 0


@dataclass(frozen=True)
class Judged:
    """prices: that it was planned by. step: None where it was not put on the timeline. partly: where a limit leaves
    less to transfers, with the least that is too much."""

    planned: PlannedGraph
    prices: Prices
    step: Prediction | None
    partly: Judged | None = None

    @property
    def seconds(self) -> float:
        assert self.step is not None
        return self.step.seconds

    @property
    def peak(self) -> MemoryStep:
        """Where most bytes are alive, on the fullest rank."""
        assert self.step is not None
        return self.step.peak

    @property
    def memory(self) -> MemoryWalk | None:
        """What is alive when, on the fullest rank."""
        return None if self.step is None else self.step.memory

    @property
    def phase_seconds(self) -> Sequence[float]:
        """Of the forward, the backward and the update."""
        assert self.step is not None
        return self.step.phase_seconds

    def spared(self, over: Callable[[Judged], int]) -> Spared:
        """over: bytes by which a plan is over the limit."""
        if self.partly is None:
            return Spared()
        return Spared(self.seconds - self.partly.seconds, over(self.partly))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return self.planned.collectives


def judged(
    joint: JointGraph,
    assignment: Assignment,
    prices: Prices,
    predict: Callable[[PlannedGraph, Prices], Prediction] | None = None,
) -> Judged:
    """Planned by `prices`, and its step under them."""
    planned = decide(joint, assignment, prices)
    return Judged(planned, prices, (predict or partial(predicted_step, joint))(planned, prices))


def judged_within(
    joint: JointGraph, assignment: Assignment, prices: Prices, over: Callable[[Judged], int]
) -> Judged:
    """`judged`, or what is within a limit: with fewer bytes in transfers at once, as many as fit.

    over: bytes by which a plan is over the limit. Where even transfers that go one by one hold too much, the one that
    is least over is returned.
    """
    steps = StepInOrders(joint)
    first = judged(joint, assignment, prices, steps.predicted)
    moved = first.peak.by_kind[KINDS.index("moved")]
    # Share of the peak that transfers must hold for fewer at once to be tried.
    if over(first) <= 0 or moved < 0.01 * first.peak.nbytes:
        return first
    again = lambda nbytes: judged(joint, assignment, prices.holding(nbytes), steps.predicted)
    alone = again(0)
    if over(alone) > 0:
        return min(first, alone, key=over)
    best, partly = alone, first
    # How often what transfers hold at the peak is halved, at most, where all of it is too much, and none of it
    # is not.
    too_much, fits = 0, 8
    while fits - too_much > 1:
        middle = (too_much + fits) // 2
        one = again(moved >> middle)
        if over(one) > 0:
            too_much, partly = middle, one
        else:
            fits, best = middle, min(best, one, key=lambda each: each.seconds)
    return replace(best, partly=partly)
