"""An assignment of layouts, lowered, and its step on the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.plan.decide import Moved, decide_lowering
from passes.plan.lowering_plan import LoweringPlan
from passes.predict.memory_walk import MemoryStep, MemoryWalk
from passes.predict.predict_step import Prediction, predicted_step
from passes.strategies.prices import Prices

__all__ = ["Judged", "judged", "lowered"]


@dataclass(frozen=True)
class Judged:
    """moved: every transfer's steps with their prices. step: None where it was not put on the timeline."""

    assignment: Assignment
    lowering: LoweringPlan
    moved: Moved
    step: Prediction | None

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


def judged(joint: JointGraph, assignment: Assignment, prices: Prices) -> Judged:
    """Lowered by `prices`, and its step under them."""
    lowering, moved = decide_lowering(joint, assignment, prices)
    return Judged(assignment, lowering, moved, predicted_step(joint, assignment, lowering, prices))


def lowered(joint: JointGraph, assignment: Assignment, prices: Prices) -> Judged:
    """Lowered by `prices`, and not put on the timeline."""
    return Judged(assignment, *decide_lowering(joint, assignment, prices), None)
