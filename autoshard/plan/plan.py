"""`Plan` and `PipelinePlan`: what the search found, as one file: layouts, prices, proof, and what it was found for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
from msgspec import structs

from autoshard.plan.crossovers import Crossover
from autoshard.plan.crossovers import crossovers as found_crossovers
from autoshard.plan.explain import plan_difference
from autoshard.plan.plan_base import PlanBase
from autoshard.plan.plan_check import pipeline_problems, plan_problems, stage_problems
from autoshard.plan.plan_content import PipelineContent, PlanContent
from autoshard.plan.plan_file import (
    PIPELINE_FILE,
    PLAN_FILE,
    SCHEMA_VERSION,
    damaged,
    is_pipeline,
)
from autoshard.plan.plan_graph import plan_graph
from autoshard.plan.plan_origin import PlanOrigin
from autoshard.plan.why_not import Again, why_not_family, why_not_pinned
from cost_model.checked_arguments import checked_path, read_json, reject
from cost_model.errors import InfeasibleError, PlanError
from cost_model.memory import communicators
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.micro_batches.cut_batch import cut_for_stages
from passes.micro_batches.other_sizes import piece_places
from passes.plan.check_graph import differences, graph_problems
from passes.plan.describe import graph_hash
from passes.plan.records import layouts_of, lowering_of
from passes.plan.transfers import LoweringPlan
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs
from passes.states.compute_again import compute_again

__all__ = ["SCHEMA_VERSION", "AnyPlan", "PipelinePlan", "Plan", "PlanOrigin", "any_plan_from_json"]


@dataclass(frozen=True)
class Plan(PlanBase, PlanContent):
    """The fastest plan under its profile's prices.

    cost:        seconds of one training step, forward, backward and optimizer update, as the search
                 counts them. lower_bound: none of a plan that overlaps so are fewer; within a limit, of the
                 fastest plan without one. Programs that overlap better may take less. gap: (cost - lower_bound) / cost.
    status:      "optimal", or "feasible" if the time limit ended the proof or axes are joined.
    joined_axes: mesh axes that the search used together, because a mesh of so many axes has too many layouts: bound
                 and gap are of plans that do so. () joins none.
    moved_nbytes: where memory was short, bytes that transfers may hold at once; None: prices alone decide.
    step_time:   predicted seconds of a step: the program that will run, on a timeline of its kernels
                 and collectives. peak_memory: predicted bytes on the fullest device.
    memory:      those bytes at every step of that program, by kind, and what lives at the peak (docs/memory.md). None
                 of a plan that a later kind of call carried over, and of one from an older file.
    parameter_layouts: parameter name -> layout (tied names included).
    inputs, outputs: layout per tensor input and output of a call, by position.
    fallbacks:   ops without a rule, which run replicated.
    micro_batches: pieces in which a batch is run, one after the other. `records` are of the step with the first;
                 other_sizes: those of the first piece of every other size.
    head_pieces: parts over tokens into which head and loss are written, where what is large there did not fit.
    race:        of a plan that `autoshard(..., race=3)` kept: the plans that ran, the fastest first, which is this one.
    rehearsed:   of a plan whose step was rehearsed where it runs (docs/prices.md): what was modelled, and measured; all
                 seconds above are times the ratio. None: it was not.
    """

    again: Again | None = field(default=None, compare=False, repr=False)

    @property
    def stages(self) -> tuple[Plan, ...]:
        """It is its only one."""
        return (self,)

    @cached_property
    def assignment(self) -> Assignment:
        """Layouts by node name: with `lowering`, what decides each rank's program."""
        return layouts_of(self.records)

    @cached_property
    def lowering(self) -> LoweringPlan:
        """Steps, turns and interiors."""
        return lowering_of(self.records)

    def of_pieces(self, joint: JointGraph) -> list[tuple[JointGraph, Assignment, LoweringPlan]]:
        """Per piece of a batch its graph, its layouts and how they are lowered; of a whole one, `joint`'s alone."""
        sizes = [(self.assignment, self.lowering)]
        sizes += [(layouts_of(records), lowering_of(records)) for records in self.other_sizes]
        graphs = zip((joint, *joint.others), piece_places(joint), strict=True)
        return [(graph, *sizes[place]) for graph, place in graphs]

    @cached_property
    def communicators(self) -> tuple[tuple[str, ...], ...]:
        """The NCCL communicators of a rank that runs the plan, by their mesh axes, in the order in which they
        are made: of all ranks, of every axis, and of the several axes that collectives run over. None on CPUs."""
        return communicators(self.mesh, self.collective_axes)

    def to_networkx(self) -> nx.DiGraph:
        """Nodes are ops, edges values; layouts, seconds and transfers are attributes."""
        return plan_graph(self.records, self.mesh, self.memory)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the plan; the suffix chooses: .svg .dot .html .json .graphml."""
        from autoshard.drawing.draw import draw

        return draw(self.to_networkx(), path)

    def crossovers(self) -> tuple[Crossover, ...]:
        """At which bandwidth of each link level another plan would win, and which: the nearest below and above.

        Searches again, over links of one level up to 16 times slower and faster: at most 4 searches a direction. Of a
        loaded plan: PlanError."""
        return found_crossovers(self, self._again("crossovers()"))

    def why_not(self, parameter: str, placements: Any = None) -> str:
        """The plan found again otherwise, and what it costs more.

        parameter: a parameter, a pattern of them or any op's name in `to_text()`, pinned to `placements` (of an op its
        first result). Without placements a family of plans: "DDP", "FSDP", "TP", ... (docs/patterns.md).

        PlanError for an unknown name, with near ones, and of a loaded plan, which cannot search; InfeasibleError if
        no plan has it so, ShardingError if the placements do not fit. A family without a plan is told why.
        """
        if not isinstance(parameter, str):
            raise PlanError(
                str(reject("parameter", parameter, "a parameter's or node's name, or a family's"))
            )
        again = self._again(f"why_not({parameter!r})")
        if placements is None:
            return why_not_family(self, again, parameter)
        return why_not_pinned(self, again, parameter, placements)

    def _again(self, question: str) -> Again:
        if self.again is None:
            raise PlanError(
                f"{question} must search again, and this plan was loaded from a file or unpickled\n"
                "  try: plan = find_plan(model, mesh, example_inputs), then ask that plan"
            )
        return self.again

    def diff(self, other: AnyPlan) -> str:
        """Parameters and collectives in which two plans differ, with their prices."""
        if not isinstance(other, Plan):
            raise PlanError(str(reject("other", other, "a Plan without stages, or Plan.load(path)")))
        return plan_difference(self, other)

    def check_graph(self, joint: JointGraph) -> None:
        """PlanError, saying what changed, unless the plan was made for `joint`."""
        if not isinstance(joint, JointGraph):
            raise PlanError(str(reject("joint", joint, "the joint graph of a captured model")))
        if graph_hash(joint) != self.origin.graph_hash:
            lines = differences(self.records, joint, f"{self.mesh.device_type}, torch {self.origin.torch}")
            raise PlanError(
                "the plan was made for another model, inputs or code\n"
                + "\n".join([*lines[:8], "  try: find_plan(...) again and save the new plan"])
            )
        for problem in graph_problems(self.records, compute_again(joint, self.lowering.again)):
            raise PlanError(
                f"the plan is damaged: {problem}\n  try: find_plan(...) again and save the new plan"
            )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> AnyPlan:
        """Read a saved plan. PlanError if it is missing, not a plan, damaged, or of another schema version."""
        file = checked_path(path, "plan", PlanError)
        return any_plan_from_json(read_json(file, "plan", PlanError), where=str(file))

    def to_json(self) -> dict[str, Any]:
        return PLAN_FILE.data(self)

    @staticmethod
    def from_json(data: Any, *, where: str = "plan") -> Plan:
        """Inverse of `to_json`. PlanError for anything else: what is accepted can be shown, drawn and compared."""
        plan = Plan(**PLAN_FILE.fields(data, where))
        for problem in plan_problems(plan):
            raise damaged(where, problem)
        for records in plan.other_sizes:
            for problem in plan_problems(replace(plan, records=records)):
                raise damaged(where, f"micro-batches of another size: {problem}")
        return plan


@dataclass(frozen=True)
class PipelinePlan(PlanBase, PipelineContent):
    """The plan of a model in stages along a mesh axis; its fields are those of `PipelineContent`."""

    @cached_property
    def stages(self) -> tuple[Plan, ...]:
        """The plan of each stage's graph on the ranks of one stage: `mesh` with `axis` of size 1."""
        return tuple(part.plan for part in self.parts)

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

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw all stages and pieces on one timeline, bubbles marked, and below it each stage's graph.

        The suffix chooses: .svg, .html, or .json, a trace that Perfetto opens. PlanError for another."""
        from autoshard.drawing.draw import draw_pipeline

        graphs = [stage.to_networkx() for stage in self.stages]
        return draw_pipeline(f"{self.mesh}, stages along {self.axis}", self.timeline, graphs, path)

    def diff(self, other: object) -> str:
        """In what two plans with stages differ: step, memory, schedule, cut and parameters."""
        if not isinstance(other, PipelinePlan):
            raise PlanError(str(reject("other", other, "a plan with stages, as this is one")))
        return plan_difference(self, other)

    def why_not(self, parameter: str, placements: Any = None) -> str:
        """PlanError: stages are not planned again for a question. `plan.stages[0].why_not(...)` asks one of them."""
        raise _not_there("why_not(...)", "plan.stages[0].why_not(...), of one stage as it is cut")

    def crossovers(self) -> tuple[Crossover, ...]:
        """PlanError, as `why_not`."""
        raise _not_there("crossovers()", "plan.stages[0].crossovers(), of one stage as it is cut")

    def to_json(self) -> dict[str, Any]:
        return PIPELINE_FILE.data(self)

    @staticmethod
    def from_json(data: Any, *, where: str = "plan") -> PipelinePlan:
        """Inverse of `to_json`. PlanError for anything else."""
        plan = PipelinePlan(**PIPELINE_FILE.fields(data, where))
        try:
            for problem in pipeline_problems(plan):
                raise damaged(where, problem)
        except InfeasibleError as error:  # no schedule runs so many pieces
            raise damaged(where, str(error).partition("\n")[0]) from None
        read = lambda i, part: structs.replace(
            part, plan=Plan.from_json(part.plan, where=f"{where}, stage {i}")
        )
        plan = replace(plan, parts=tuple(read(i, part) for i, part in enumerate(plan.parts)))
        for problem in stage_problems(plan):
            raise damaged(where, problem)
        return plan


AnyPlan = Plan | PipelinePlan


def any_plan_from_json(data: Any, *, where: str = "plan") -> AnyPlan:
    """Inverse of `to_json` of either kind. Raises as `Plan.from_json`."""
    return (PipelinePlan if is_pipeline(data) else Plan).from_json(data, where=where)


def _not_there(question: str, instead: str) -> PlanError:
    return PlanError(f"{question} is not there for plans with stages\n  try: {instead}")
