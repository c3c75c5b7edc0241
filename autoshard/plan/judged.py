"""An assignment of layouts, lowered, and its step on the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.plan.decide import decide
from passes.plan.planned_graph import Collective, PlannedGraph
from passes.predict.predict_step import StepInOrders, predicted_step
from passes.predict.prediction import KINDS, MemoryStep, MemoryWalk, Prediction
from passes.search.corrected_rows import Held
from passes.strategies.prices import Prices


@dataclass(frozen=True)
class Judged:
    """prices: that it was planned by. step: None where it was not put on the timeline. tried: within a limit, each as
    it is planned with so much in transfers at once."""

    planned: PlannedGraph
    prices: Prices
    step: Prediction | None
    tried: tuple[Judged, ...] = ()

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
    def held(self) -> Held:
        """Bytes of every step of the program, on the fullest rank."""
        assert self.memory is not None
        return self.memory.held()

    @property
    def phase_seconds(self) -> Sequence[float]:
        """Of the forward, the backward and the update."""
        assert self.step is not None
        return self.step.phase_seconds

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
    tried = [judged(joint, assignment, prices, steps.predicted)]
    (first,) = tried
    moved = first.peak.by_kind[KINDS.index("moved")]

    def fits(nbytes: int) -> bool:
        tried.append(judged(joint, assignment, prices.holding(nbytes), steps.predicted))
        return over(tried[-1]) <= 0

    # Share of the peak that transfers must hold for fewer at once to be tried.
    if over(first) > 0 and moved >= 0.01 * first.peak.nbytes and fits(0):
        # How often what transfers hold at the peak is halved, at most, where all of it is too much, and none is not.
        too_much, enough = 0, 8
        while enough - too_much > 1:
            middle = (too_much + enough) // 2
            too_much, enough = (too_much, middle) if fits(moved >> middle) else (middle, enough)
    fitting = [one for one in tried if over(one) <= 0]
    best = min(fitting, key=lambda one: one.seconds) if fitting else min(tried, key=over)
    return replace(best, tried=tuple(tried))
