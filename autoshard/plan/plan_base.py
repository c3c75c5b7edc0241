"""What plans without and with stages can be asked alike."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from typing import Any

from torch.distributed.tensor import Placement

from autoshard.plan.explain import explain_plan, plan_text
from autoshard.plan.explain_part import explain_named
from autoshard.plan.plan_content import PipelineContent
from autoshard.plan.plan_file import write_plan
from autoshard.plan.plan_prices import Collective, collectives_of
from autoshard.plan.why_not import crossover_lines
from cost_model.checked_arguments import checked_flag, reject
from cost_model.errors import PlanError
from passes.layout.placements import layout_to_placements


class PlanBase:
    """Of `Plan` and `PipelinePlan`."""

    @property
    def _plan(self) -> Any:
        """Itself, with what its content holds."""
        return self

    @property
    def fingerprint(self) -> str:
        """Hash of the layouts, the cut, the schedule and of what they were found for."""
        plan = self._plan
        held = [(stage.mesh, stage.records, *stage.other_sizes) for stage in plan.stages]
        division = (
            (plan.axis, plan.schedule, plan.micro_batches, plan.cut)
            if isinstance(plan, PipelineContent)
            else ()
        )
        content = repr((plan.mesh, held, *division, plan.origin.graph_hash))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def parameters(self) -> dict[str, tuple[Placement, ...]]:
        """Parameter name -> one torch placement per mesh axis; along an axis of stages it is of its holders alone."""
        layouts, mesh = self._plan.parameter_layouts, self._plan.mesh
        return {name: layout_to_placements(layout, mesh) for name, layout in layouts.items()}

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step, in order, stage by stage; what passes between stages is none."""
        return tuple(c for stage in self._plan.stages for c in collectives_of(stage.records))

    @cached_property
    def collective_axes(self) -> list[tuple[str, ...]]:
        """The mesh axes of every collective of a step, of all stages and of pieces of all sizes, in order."""
        of_stages = [(stage.records, *stage.other_sizes) for stage in self._plan.stages]
        return [c.axes for sizes in of_stages for records in sizes for c in collectives_of(records)]

    def to_text(self, *, seconds: bool = True) -> str:
        """The planned graph, of every stage, in the text form of docs/plans.md."""
        return plan_text(self._plan, seconds=checked_flag(seconds, "seconds"))

    def explain(self, node: str | None = None, *, crossovers: bool = False) -> str:
        """Where the time and the bytes go, when stages run; with `node`, of one op, parameter or module with all that
        it holds.

        Equal layers are explained once, "x 32". crossovers: also at which bandwidths another plan would win, which
        searches again (`crossovers()`). PlanError, with the nearest names, for a name that the plan lacks."""
        if node is not None and not isinstance(node, str):
            raise PlanError(str(reject("node", node, "a name from explain() or to_text(), or None")))
        if not isinstance(crossovers, bool):
            raise PlanError(str(reject("crossovers", crossovers, "True or False")))
        further = ["", *crossover_lines(self._plan.crossovers()), ""] if crossovers else []
        text = explain_plan(self._plan) if node is None else explain_named(self._plan, node)
        return text + "\n".join(further)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON that `load` reads. PlanError where no file can be written."""
        write_plan(self._plan.to_json(), path)
