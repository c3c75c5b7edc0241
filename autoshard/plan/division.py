"""How a call is divided: its batch into pieces, its model into stages; and its fastest plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoshard.plan.micro_batches import fastest_in_pieces
from autoshard.plan.plan import AnyPlan, Plan
from autoshard.plan.stages_option import fastest_of_stages
from autoshard.plan.task import Task, search_plan
from cost_model.deadline import Deadline
from passes.capture import Captured

__all__ = ["WHOLE", "Division"]

Search = Callable[[Task, Deadline], Plan]


@dataclass(frozen=True)
class Division:
    """What `find_plan` was asked for, checked.

    micro_batches: pieces, or "auto". stages: the axis that holds stages, "auto", or None. schedule: the only one that
    may run stages; None: any."""

    micro_batches: int | str = 1
    stages: str | None = None
    schedule: str | None = None

    def leaves_whole(self, memory_limit: int | None) -> bool:
        """Whether a call within this limit is run as one: "auto" tries pieces only where the whole may not fit."""
        return self.stages is None and (
            self.micro_batches == 1 or (self.micro_batches == "auto" and memory_limit is None)
        )

    def fastest(self, task: Task, deadline: Deadline, search: Search = search_plan) -> AnyPlan:
        """The fastest plan of the whole call `task`, divided so. search: of a call without stages that is cut, or
        whole. Raises InfeasibleError."""
        pieces = self.micro_batches

        def planned(cut: Captured, until: Deadline) -> Plan:
            return search(replace(task, captured=cut), until)

        def without_stages(until: Deadline) -> Plan:
            return fastest_in_pieces(task.captured, pieces, task.memory_limit, planned, until)

        if self.stages is None:
            return without_stages(deadline)
        return fastest_of_stages(task, self.stages, pieces, without_stages, deadline, self.schedule)


WHOLE = Division()
"""Neither in pieces nor in stages."""
