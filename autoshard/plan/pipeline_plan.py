"""`PipelinePlan`: a plan whose mesh axis holds stages, and what can be asked of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from autoshard.plan.explain_part import explain_part
from autoshard.plan.pipeline_content import P, PipelineContent
from autoshard.plan.pipeline_json import pipeline_from_json, pipeline_to_json
from autoshard.plan.pipeline_words import explain_pipeline, pipeline_difference, pipeline_text
from autoshard.plan.plan_collectives import Collective, collectives_of
from autoshard.plan.plan_graph import plan_graph
from autoshard.plan.plan_json import write_plan
from cost_model.checked_arguments import reject
from cost_model.errors import PlanError
from passes.ir.joint import JointGraph
from passes.micro_batches.cut_batch import cut_for_stages
from passes.plan.describe import graph_hash
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs

__all__ = ["PipelinePlan"]


@dataclass(frozen=True)
class PipelinePlan(PipelineContent[P]):
    """The plan of a model in stages along a mesh axis; its fields are those of `PipelineContent`."""

    def stage_graphs(self, joint: JointGraph) -> tuple[StageGraph, ...]:
        """The graph of each stage, in pieces: of the canonical graph `joint` of the call."""
        return stage_graphs(cut_for_stages(joint, self.micro_batches), self.cut)

    def check_graph(self, joint: JointGraph) -> None:
        """PlanError unless the plan was made for `joint`, the canonical graph of a call."""
        if graph_hash(joint) != self.origin.graph_hash:
            raise PlanError(
                "the plan was made for another model, inputs or code\n"
                "  try: find_plan(..., stages=...) again and save the new plan"
            )

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of every stage; what passes between stages is none."""
        return tuple(c for stage in self.stages for c in collectives_of(stage.records))

    @cached_property
    def collective_axes(self) -> list[tuple[str, ...]]:
        """The mesh axes of every collective of a step, of all stages and of pieces of all sizes, in order."""
        of_stages = [(stage.records, *stage.other_sizes) for stage in self.stages]
        return [c.axes for sizes in of_stages for records in sizes for c in collectives_of(records)]

    def to_text(self, *, seconds: bool = True) -> str:
        """The planned graph of every stage in the text form of docs/plans.md."""
        return pipeline_text(self, seconds=seconds)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw all stages and pieces on one timeline, bubbles marked, and below it each stage's graph.

        The suffix chooses: .svg, .html, or .json, a trace that Perfetto opens. PlanError for another."""
        graphs = [plan_graph(stage.records, stage.mesh, stage.memory) for stage in self.stages]
        from autoshard.drawing.draw_pipeline import draw_pipeline

        return draw_pipeline(f"{self.mesh}, stages along {self.axis}", self.timeline, graphs, path)

    def explain(self, node: str | None = None, *, crossovers: bool = False) -> str:
        """When stages run, what they hold and send; with `node`, of one op, parameter or module.

        PlanError, with the nearest names, for a name that the plan lacks, and for crossovers, as `crossovers()`."""
        if crossovers:
            self.crossovers()
        if node is None:
            return explain_pipeline(self)
        if not isinstance(node, str):
            raise PlanError(str(reject("node", node, "a name from explain() or to_text(), or None")))
        error: PlanError | None = None
        found: list[str] = []
        for number, stage in enumerate(self.stages):
            try:
                found.append(f"stage {number}\n{explain_part(stage.records, node, stage.parameter_layouts)}")
            except PlanError as reason:
                error = error or reason
        if not found:
            assert error is not None
            raise error
        return "".join(found)

    def diff(self, other: object) -> str:
        """In what two plans with stages differ: step, memory, schedule, cut and parameters."""
        if not isinstance(other, PipelinePlan):
            raise PlanError(str(reject("other", other, "a plan with stages, as this is one")))
        return pipeline_difference(self, other)

    def why_not(self, parameter: str, placements: Any = None) -> str:
        """PlanError: stages are not planned again for a question. `plan.stages[0].why_not(...)` asks one of them."""
        raise _not_there("why_not(...)", "plan.stages[0].why_not(...), of one stage as it is cut")

    def crossovers(self) -> tuple[object, ...]:
        """PlanError, as `why_not`."""
        raise _not_there("crossovers()", "plan.stages[0].crossovers(), of one stage as it is cut")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON that `Plan.load` reads. PlanError where no file can be written."""
        write_plan(self.to_json(), path)

    def to_json(self) -> dict[str, Any]:
        return pipeline_to_json(self)

    @classmethod
    def from_json(cls, data: Any, stage_from: Callable[..., P], *, where: str = "plan") -> Self:
        """Inverse of `to_json`. stage_from: `Plan.from_json`. PlanError for anything else."""
        content = pipeline_from_json(data, where, stage_from)
        return cls(**{one.name: getattr(content, one.name) for one in fields(content)})


def _not_there(question: str, instead: str) -> PlanError:
    return PlanError(f"{question} is not there for plans with stages\n  try: {instead}")
