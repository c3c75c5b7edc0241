"""What a plan decides beside the layouts: all that turns them into each rank's program, and no price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.plan.transfers import Transfer, Turn
from passes.redistribution.steps import Step

__all__ = ["LoweringPlan"]


@dataclass(frozen=True)
class LoweringPlan:
    """steps:  every transfer, an operand read in another layout than it is held in, -> how it is brought there.
    turns:     every transfer -> its place in the one order of all ranks; those of one turn are merged, a bucket.
    interiors: ops computed in parts, so that a halo travels meanwhile (`passes.lower.interior`) -> the factor cut.
    ahead:     transfers whose operand is at hand -> how many of their collectives are in flight at most when they
    start.

    again:     ops of the forward that the backward computes once more (`passes.states.compute_again`).

    What else the forward saves and the backward computes again, where that costs nothing, follows from a rank's program
    (`passes.lower.recompute`): it is not written down again.
    """

    steps: Mapping[Transfer, tuple[Step, ...]]
    turns: Mapping[Transfer, Turn]
    interiors: Mapping[str, str]
    ahead: Mapping[Transfer, int] = field(default_factory=dict[Transfer, int])
    again: tuple[str, ...] = ()
