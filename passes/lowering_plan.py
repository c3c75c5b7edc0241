"""What a plan decides beside the layouts: all that turns them into each rank's program, and no price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.redistribution.steps import Step
from passes.transfers import Transfer, Turn

__all__ = ["LoweringPlan"]


@dataclass(frozen=True)
class LoweringPlan:
    """steps:  every transfer, an operand read in another layout than it is held in, -> how it is brought there.
    turns:     every transfer -> its place in the one order of all ranks; those of one turn are merged, a bucket.
    interiors: ops computed in parts, so that a halo travels meanwhile (`passes.interior`) -> the factor cut.

    What the forward saves and the backward computes again follows from a rank's program, at the fewest bytes and
    without prices (`passes.recompute`): it is not written down again.
    """

    steps: Mapping[Transfer, tuple[Step, ...]]
    turns: Mapping[Transfer, Turn]
    interiors: Mapping[str, str]
