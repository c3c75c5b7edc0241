"""One kind of call, made into this rank's program by any of several plans, which may cut it differently."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoshard.calls.call_ends import CallEnds
from autoshard.plan.plan import AnyPlan, PipelinePlan
from autoshard.plan.task import CallLayouts
from autoshard.runtime.agreement import collectively
from autoshard.runtime.making import Made, Workshop
from autoshard.runtime.pipeline_making import making_of
from autoshard.runtime.programs import AnyProgram
from autoshard.runtime.race_entry import RaceEntry
from autoshard.watching.kinds import kind_of
from passes.capture import Captured

__all__ = ["CallMaking"]


class CallMaking:
    """captured, layouts: of the call, whole. All ranks come to each method together, with the same plan."""

    def __init__(self, home: Workshop, captured: Captured, layouts: CallLayouts) -> None:
        self._home, self._captured, self._layouts = home, captured, layouts
        self._kind = kind_of(home.model, captured.joint)
        self._cuts: dict[object, Captured] = {}

    def cut(self, plan: AnyPlan) -> Captured:
        """The call as the plan runs it: whole, or in pieces. Plans that cut it alike are given one graph."""
        pieces = plan.micro_batches
        way = ("stages", pieces) if isinstance(plan, PipelinePlan) else (plan.head_pieces, pieces)
        if way not in self._cuts:
            made = lambda: making_of(self._home, plan).cut(self._captured)
            self._cuts[way] = collectively(self._home.mesh, made, what="cutting a batch")
        return self._cuts[way]

    def made(self, plan: AnyPlan) -> Made:
        """Lowered; what compiles it."""
        return making_of(self._home, plan).made(self.cut(plan), self._kind)

    def ends(self, plan: AnyPlan) -> CallEnds:
        return making_of(self._home, plan).ends(self.cut(plan), self._layouts)

    def entry(self, plan: AnyPlan, program: AnyProgram, tensors: Sequence[Tensor]) -> RaceEntry:
        """The plan on copies of what a training step reads and writes. tensors: of the call, flat."""
        making = making_of(self._home, plan)
        joint, sides = self.cut(plan).joint, self.ends(plan).inputs
        return RaceEntry(self._home.model, joint, self._home.mesh, tensors, program, sides, making.places())
