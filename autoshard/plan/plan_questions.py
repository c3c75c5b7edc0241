"""What a plan is asked that takes pricing or searching again: other sizes, other links, a node otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

from autoshard.plan.crossovers import Crossover, SizeCrossover, link_crossovers, size_crossovers, size_lines
from autoshard.plan.families import Again
from autoshard.plan.plan_content import PlanContent
from autoshard.plan.why_not import why_not_family, why_not_pinned
from cost_model.checked_arguments import reject
from cost_model.errors import PlanError


@dataclass(frozen=True)
class PlanQuestions(PlanContent):
    """again: the task that it was found for; None of a plan that was loaded or unpickled."""

    again: Again | None = field(default=None, compare=False, repr=False)

    def at(self, **sizes: int) -> Self:
        """The plan at other sizes of its call, `plan.at(sequence=4096)`: its layouts wherever they fit and what it
        computes again, predicted anew; nothing is proven of it, and no memory limit is asked.

        sizes: "batch", "sequence", "height", "width" (docs/plans.md), of the whole call; what is not named stays.
        PlanError as `crossovers`, ShardingError for a size that the call does not have, CaptureError for one that the
        model does not take."""
        return cast(Self, self._carried("at(...)")(self, sizes))

    def step_time_at(self, **sizes: int) -> float:
        """Predicted seconds of a step of the plan's layouts at other sizes (`at`)."""
        return self.at(**sizes).step_time

    def memory_at(self, **sizes: int) -> int:
        """Predicted bytes on the fullest device at other sizes (`at`)."""
        return self.at(**sizes).peak_memory

    def size_crossovers(self, **ranges: tuple[int, int]) -> tuple[SizeCrossover, ...]:
        """From which size on another plan wins, and which: of each name the nearest below and above, within the range
        that is given, `plan.size_crossovers(sequence=(1, 8192))`; the other sizes stay. Between, the plan stays the
        fastest of those known. Searches again, at most 4 times a direction, plans in as many pieces; raises as `at`."""
        self._carried("size_crossovers(...)")
        return size_crossovers(self, self._again("size_crossovers(...)", "size_crossovers(...)"), ranges)

    def _asked_sizes(self) -> list[str]:
        ranges = {} if self.again is None else self.again.ranges
        return size_lines(self.size_crossovers(**ranges), ranges) if ranges else []

    def crossovers(self) -> tuple[Crossover, ...]:
        """At which bandwidth of each link level another plan would win, and which: the nearest below and above.

        Searches again, over links of one level up to 16 times slower and faster: at most 4 searches a direction. Of a
        loaded plan, and of one with stages, which are not planned again for a question: PlanError."""
        return link_crossovers(self, self._again("crossovers()", "crossovers()"))

    def why_not(self, parameter: str, placements: Any = None) -> str:
        """The plan found again otherwise, and what it costs more.

        parameter: a parameter, a pattern of them or any op's name in `to_text()`, pinned to `placements` (of an op its
        first result). Without placements a family of plans: "DDP", "FSDP", "TP", ... (docs/patterns.md).

        PlanError for an unknown name, with near ones, and as `crossovers`; InfeasibleError if
        no plan has it so, ShardingError if the placements do not fit. A family without a plan is told why.
        """
        if not isinstance(parameter, str):
            raise PlanError(
                str(reject("parameter", parameter, "a parameter's or node's name, or a family's"))
            )
        again = self._again(f"why_not({parameter!r})", "why_not(...)")
        if placements is None:
            return why_not_family(self, again, parameter)
        return why_not_pinned(self, again, parameter, placements)

    def _carried(self, question: str) -> Callable[[PlanContent, Mapping[str, int]], PlanContent]:
        again = self.again
        if again is None or again.carried is None:
            raise PlanError(
                f"{question} captures the call at other sizes, and this plan is of a stage, or loaded or unpickled\n"
                "  try: the plan of the whole call, plan = find_plan(model, mesh, example_inputs)"
            )
        return again.carried

    def _again(self, question: str, of_a_stage: str) -> Again:
        if self.axis:
            raise PlanError(
                f"{of_a_stage} is not there for plans with stages\n"
                f"  try: plan.stages[0].{of_a_stage}, of one stage as it is cut"
            )
        if self.again is None:
            raise PlanError(
                f"{question} must search again, and this plan was loaded from a file or unpickled\n"
                "  try: plan = find_plan(model, mesh, example_inputs), then ask that plan"
            )
        return self.again
