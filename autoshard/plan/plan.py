"""`Plan` and `PipelinePlan`: what the search found, as one file: layouts, prices, proof, and what it was found for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
from msgspec import structs
from torch.distributed.tensor import Placement

from autoshard.plan.crossovers import crossover_lines
from autoshard.plan.explain import explain_plan, plan_difference, plan_text
from autoshard.plan.explain_part import explain_named
from autoshard.plan.plan_check import pipeline_problems, plan_problems, stage_problems
from autoshard.plan.plan_content import (
    PIPELINE_FILE,
    PLAN_FILE,
    Part,
    PlanContent,
    check_undamaged,
    gap_of,
    scheduled_parts,
    write_plan,
)
from autoshard.plan.plan_graph import plan_graph
from autoshard.plan.plan_summary import plan_summary
from autoshard.plan.stage_schedule import pipeline_memory
from autoshard.plan.why_not import PlanQuestions
from cost_model.errors import PlanError, checked_flag, checked_path, read_json, reject, write_text
from cost_model.memory import communicators
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.layout.placements import layout_to_placements
from passes.micro_batches.cut_batch import cut_for_stages, piece_places
from passes.plan.describe import graph_hash
from passes.plan.planned_graph import PlannedGraph
from passes.plan.transfers import differences, graph_problems
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs
from passes.states.compute_again import compute_again


@dataclass(frozen=True)
class Plan(PlanQuestions):
    """The fastest plan under its profile's prices.

    cost:        seconds of one training step, forward, backward and optimizer update, as the search
                 counts them. lower_bound: no plan is counted fewer, within a limit none without one; lower, where a
                 program that was judged is faster than counted. gap: (cost - lower_bound) / cost.
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
    ran:         what of that program runs when, kernels and collectives, and what of these is exposed. () where
                 memory is None.
    micro_batches: pieces in which a batch is run, one after the other. `records` are of the step with the first;
                 other_sizes: those of the first piece of every other size.
    head_pieces: parts over tokens into which head and loss are written, where what is large there did not fit.
    most_gain:   share of its step that a plan can save at most over one in which every rank does all the work, however
                 much of its communication hides; None: not known. Up to 2 % latency decides: the search ends at once.
    race:        of a plan that `autoshard(..., race=3)` kept: the plans that ran, the fastest first, which is this one.
    rehearsed:   of a plan whose step was rehearsed where it runs (docs/prices.md): what was modelled, and measured; all
                 seconds above are times the ratio. None: it was not.
    """

    @property
    def stages(self) -> tuple[Plan, ...]:
        """Its only one is it itself, without an axis of stages; else the plan of each stage's graph on the ranks of one
        stage: `mesh` with `axis` of size 1."""
        return tuple(part.plan for part in self.parts) or (self,)

    @property
    def fingerprint(self) -> str:
        """Hash of the layouts, the cut, the schedule and of what they were found for."""
        held = [(stage.mesh, stage.records, *stage.other_sizes) for stage in self.stages]
        division = (self.axis, self.schedule, self.micro_batches, self.cut) if self.axis else ()
        content = repr((self.mesh, held, *division, self.origin.graph_hash))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def parameters(self) -> dict[str, tuple[Placement, ...]]:
        """Parameter name -> one torch placement per mesh axis; along an axis of stages it is of its holders alone."""
        held = self.parameter_layouts.items()
        return {name: layout_to_placements(layout, self.mesh) for name, layout in held}

    @cached_property
    def collective_axes(self) -> list[tuple[str, ...]]:
        """The mesh axes of every collective of a step, of all stages and of pieces of all sizes, in order."""
        sizes = [size for stage in self.stages for size in stage.sizes]
        return [
            axes for size in sizes for axes in (*(c.axes for c in size.collectives), *size.rings.values())
        ]

    def __str__(self) -> str:
        """One screen: mesh, step, memory, gap, and what each axis does."""
        return plan_summary(self)

    def to_text(self, *, seconds: bool = True) -> str:
        """The planned graph, of every stage, in the text form of docs/plans.md."""
        return plan_text(self, seconds=checked_flag(seconds, "seconds"))

    def explain(self, node: str | None = None, *, crossovers: bool = False) -> str:
        """Where the time and the bytes go, when stages run; with `node`, of one op, parameter or module with all that
        it holds.

        Equal layers are explained once, "x 32". crossovers: also at which bandwidths another plan would win, and from
        which of the `sizes` on that were asked for, which searches again (`crossovers()`, `size_crossovers(...)`).
        PlanError, with the nearest names, for a name that the plan lacks."""
        if node is not None and not isinstance(node, str):
            raise PlanError(str(reject("node", node, "a name from explain() or to_text(), or None")))
        if not isinstance(crossovers, bool):
            raise PlanError(str(reject("crossovers", crossovers, "True or False")))
        further: list[str] = []
        if crossovers:
            further = ["", *crossover_lines(self.crossovers()), *self._asked_sizes(), ""]
        text = explain_plan(self) if node is None else explain_named(self, node)
        return text + "\n".join(further)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON that `load` reads. PlanError where no file can be written."""
        write_plan(self.to_json(), path)

    @cached_property
    def sizes(self) -> tuple[PlannedGraph, ...]:
        """Of the step with the first piece, and with the first of every other size."""
        return (self.planned, *map(PlannedGraph, self.other_sizes))

    def of_pieces(self, joint: JointGraph) -> list[tuple[JointGraph, PlannedGraph]]:
        """Per piece of a batch its graph, and that as it is planned; of a whole one, `joint`'s alone."""
        graphs = zip((joint, *joint.others), piece_places(joint), strict=True)
        return [(graph, self.sizes[place]) for graph, place in graphs]

    @cached_property
    def communicators(self) -> tuple[tuple[str, ...], ...]:
        """The NCCL communicators of a rank that runs the plan, by their mesh axes, in the order in which they
        are made: of all ranks, of every axis, and of the several axes that collectives run over. None on CPUs."""
        return communicators(self.mesh, self.collective_axes)

    def to_networkx(self) -> nx.DiGraph:
        """Nodes are ops, edges values; layouts, seconds and transfers are attributes."""
        return plan_graph(self.planned, self.mesh, self.memory)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the plan; the suffix chooses: .html, the report (docs/how-to/report.md), or .svg .dot .json .graphml."""
        from autoshard.drawing.draw import draw, is_page, write_page

        return write_page(path, ("plan", self)) if is_page(path) else draw(self.to_networkx(), path)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a module of stock PyTorch, `make_mesh(device)` and `parallelize(model, mesh)`: `fully_shard`, DDP,
        `parallelize_module` and checkpoints (docs/by-hand.md). Its head says what of the plan it does not do.

        PlanError where none of it can be written so, as of stages."""
        from autoshard.plan.export_code import export_code

        target = checked_path(path, "path", PlanError)
        write_text(target, export_code(self), "code", PlanError)
        return target

    def diff(self, other: Plan) -> str:
        """Parameters and collectives in which two plans differ, with their prices; with stages schedule and cut as
        well."""
        if not isinstance(other, Plan) or bool(other.axis) != bool(self.axis):
            wanted = (
                "a plan with stages, as this is one"
                if self.axis
                else "a Plan without stages, or Plan.load(path)"
            )
            raise PlanError(str(reject("other", other, wanted)))
        return plan_difference(self, other)

    def check_graph(self, joint: JointGraph) -> None:
        """PlanError, saying what changed, unless the plan was made for `joint`; with stages the canonical graph of a
        call."""
        if not isinstance(joint, JointGraph):
            raise PlanError(str(reject("joint", joint, "the joint graph of a captured model")))
        again = f"  try: find_plan(...{', stages=...' if self.axis else ''}) again and save the new plan"
        if graph_hash(joint) != self.origin.graph_hash:
            made_on = f"{self.mesh.device_type}, torch {self.origin.torch}"
            lines = [] if self.axis else differences(self.records, joint, made_on)
            said = ["the plan was made for another model, inputs or code", *lines[:8], again]
            raise PlanError("\n".join(said))
        if not self.axis:
            for problem in graph_problems(self.planned, compute_again(joint, self.planned.again)):
                raise PlanError(f"the plan is damaged: {problem}\n{again}")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan. PlanError if it is missing, not a plan, damaged, or of another schema version."""
        file = checked_path(path, "plan", PlanError)
        return Plan.from_json(read_json(file, "plan", PlanError), where=str(file))

    def to_json(self) -> dict[str, Any]:
        return (PIPELINE_FILE if self.axis else PLAN_FILE).data(self)

    @staticmethod
    def from_json(data: Any, *, where: str = "plan") -> Plan:
        """Inverse of `to_json`. PlanError for anything else: what is accepted can be shown, drawn and compared."""
        staged = isinstance(data, dict) and "stages" in data
        return _pipeline_of(data, where) if staged else _whole_of(data, where)


def _whole_of(data: Any, where: str) -> Plan:
    plan = Plan(**PLAN_FILE.fields(data, where))
    check_undamaged(where, plan_problems(plan))
    return plan


def _pipeline_of(data: Any, where: str) -> PipelinePlan:
    read = PIPELINE_FILE.fields(data, where)
    check_undamaged(where, pipeline_problems(**read))
    parts = [
        structs.replace(part, plan=_whole_of(part.plan, f"{where}, stage {i}"))
        for i, part in enumerate(read["parts"])
    ]
    check_undamaged(
        where, stage_problems(parts, read["mesh"].resized(read["axis"], 1), read["micro_batches"])
    )
    return PipelinePlan.of(**{**read, "parts": tuple(parts)})


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """The plan of a model in stages along a mesh axis; what is not said here is as of `Plan`.

    mesh:          the whole mesh, of which `axis` holds the stages. Stage s is at coordinate s mod its size.
    schedule:      one of `ORDERS` in `passes.stages.pipeline_orders`. micro_batches: pieces of a batch.
    cut:           the op of the call's graph in pieces with which each stage but the first begins.
    parts:         the stages, in order; everything below is derived from their seconds and bytes.
    bound_of_cut:  the cut's longest stage, as it was estimated, is at most so much longer, as a share, than that of any
                   cut into as many stages; None of a later kind of call, whose cut follows from the parameters.

    step_time:     predicted seconds of a step, all stages on one timeline. bubble: the share of it in which ranks wait.
    cost, lower_bound: `step_time`, and what the search counts for the stages of the busiest rank at least, if it never
                   waits: for any plans of these stages that pass the same between them, without a limit.
                   gap: (cost - lower_bound) / cost, so the bubble is in it. Of other cuts
                   `bound_of_cut` alone is said, of other numbers of pieces nothing.
    status:        "optimal" where the bound is met, which a bubble rules out; else "feasible".
    peak_memory:   predicted bytes on the fullest rank: what its stages hold and keep in flight, and one piece makes.
    memory:        those bytes at each action of that rank, by kind, and what lives at the peak (docs/pipeline.md); None
                   where that of one of its stages is not known.
    outputs:       of the call, by position; `returned_by` says by which stage.
    holders:       parameter name -> coordinates along `axis` of the ranks that hold it, several where stages share it.
    """

    @staticmethod
    def of(**given: Any) -> PipelinePlan:
        """given: the fields that do not follow from its stages."""
        return PipelinePlan(**given, **of_stages(**given))

    def stage_graphs(self, joint: JointGraph) -> tuple[StageGraph, ...]:
        """The graph of each stage, in pieces: of the canonical graph `joint` of the call."""
        return stage_graphs(cut_for_stages(joint, self.micro_batches), self.cut)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw all stages and pieces on one timeline, bubbles marked, and each stage's graph.

        The suffix chooses: .html, the report (docs/how-to/report.md), .svg, or .json, a trace that Perfetto opens.
        PlanError for another."""
        from autoshard.drawing.draw import draw_pipeline, is_page, write_page

        if is_page(path):
            return write_page(path, ("plan", self))
        graphs = [stage.to_networkx() for stage in self.stages]
        return draw_pipeline(f"{self.mesh}, stages along {self.axis}", self.timeline, graphs, path)


def of_stages(
    *, mesh: MeshSpec, axis: str, schedule: str, micro_batches: int, parts: Sequence[Part], **_others: Any
) -> dict[str, Any]:
    """By name, what of a plan with stages follows from them. Raises as `scheduled_parts`."""
    ranks = mesh.size(axis)
    scheduled = scheduled_parts(ranks, schedule, micro_batches, parts)
    stages: list[PlanContent] = [part.plan for part in parts]
    cost = scheduled.seconds
    busiest = max(sum(stage.lower_bound for stage in stages[rank::ranks]) for rank in range(ranks))
    memory = pipeline_memory(scheduled, [stage.memory for stage in stages])
    return {
        "cost": cost,
        "lower_bound": min(cost, busiest),
        # The bound is met without a bubble alone.
        "status": "optimal" if gap_of(cost, busiest) <= 1e-9 else "feasible",
        "step_time": cost,
        "peak_memory": max(scheduled.peaks),
        "peak_node": "" if memory is None else memory.peak.node,
        "memory": memory,
        "parameter_layouts": {name: at for stage in stages for name, at in stage.parameter_layouts.items()},
        "outputs": {
            position: stage.outputs[index]
            for stage, part in zip(stages, parts, strict=True)
            for index, position in enumerate(part.returns)
        },
        "fallbacks": tuple(sorted({op for stage in stages for op in stage.fallbacks})),
    }
