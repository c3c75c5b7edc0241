"""`Plan`: what the search found, as one file: layouts, prices, proof, and what it was found for."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
from torch.distributed.tensor import Placement

from autoshard.drawing.draw import draw
from autoshard.plan.crossovers import Crossover, crossover_lines
from autoshard.plan.crossovers import crossovers as found_crossovers
from autoshard.plan.explain import explain_plan, plan_difference
from autoshard.plan.explain_part import explain_part
from autoshard.plan.piece_sizes import piece_places
from autoshard.plan.pipeline_json import is_pipeline
from autoshard.plan.pipeline_plan import PipelinePlan
from autoshard.plan.plan_check import plan_problems
from autoshard.plan.plan_collectives import Collective, collectives_of
from autoshard.plan.plan_content import PlanContent, PlanOrigin
from autoshard.plan.plan_graph import plan_graph
from autoshard.plan.plan_json import SCHEMA_VERSION, damaged, plan_data, plan_fields, plan_to_json, write_plan
from autoshard.plan.variants import Again
from autoshard.plan.why_not import why_not_family, why_not_pinned
from cost_model.checked_arguments import checked_flag, checked_path, reject
from cost_model.errors import PlanError
from cost_model.memory import communicators
from cost_model.text_files import read_json
from passes.ir.joint import JointGraph
from passes.layout.assignment import Assignment
from passes.layout.placements import layout_to_placements
from passes.plan.check_lowering import lowering_problems
from passes.plan.describe import graph_hash, op_counts, records_that_differ
from passes.plan.graph_text import format_graph
from passes.plan.lowering_plan import LoweringPlan
from passes.plan.records import layouts_of, lowering_of
from passes.states.compute_again import compute_again

__all__ = ["SCHEMA_VERSION", "Plan", "PlanOrigin", "any_plan_from_json"]


@dataclass(frozen=True)
class Plan(PlanContent):
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
    def fingerprint(self) -> str:
        """Hash of the layouts and of what they were found for."""
        content = repr((self.mesh, self.records, self.origin.graph_hash, *self.other_sizes))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

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
    def parameters(self) -> dict[str, tuple[Placement, ...]]:
        """Parameter name -> one torch placement per mesh axis."""
        return {n: layout_to_placements(layout, self.mesh) for n, layout in self.parameter_layouts.items()}

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of a step, in order."""
        return collectives_of(self.records)

    @cached_property
    def communicators(self) -> tuple[tuple[str, ...], ...]:
        """The NCCL communicators of a rank that runs the plan, by their mesh axes, in the order in which they
        are made: of all ranks, of every axis, and of the several axes that collectives run over. None on CPUs."""
        return communicators(self.mesh, self.collective_axes)

    @cached_property
    def collective_axes(self) -> list[tuple[str, ...]]:
        """The mesh axes of every collective of a step, of pieces of all sizes, in order."""
        return [c.axes for records in (self.records, *self.other_sizes) for c in collectives_of(records)]

    def to_text(self, *, seconds: bool = True) -> str:
        """The planned graph in the text form of docs/plans.md."""
        return format_graph(
            self.records,
            self.mesh,
            seconds=checked_flag(seconds, "seconds"),
            joined=self.joined_axes,
            raced=len(self.race),
        )

    def to_networkx(self) -> nx.DiGraph:
        """Nodes are ops, edges values; layouts, seconds and transfers are attributes."""
        return plan_graph(self.records, self.mesh, self.memory)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the plan; the suffix chooses: .svg .dot .html .json .graphml."""
        return draw(self.to_networkx(), path)

    def explain(self, node: str | None = None, *, crossovers: bool = False) -> str:
        """Where the time and the bytes go; with `node`, of one op, parameter or module with all that it holds.

        Equal layers are explained once, "x 32". crossovers: also at which bandwidths another plan would win, which
        searches again (`crossovers()`). PlanError, with the nearest names, for a name that the plan lacks."""
        if node is not None and not isinstance(node, str):
            raise PlanError(str(reject("node", node, "a name from explain() or to_text(), or None")))
        if not isinstance(crossovers, bool):
            raise PlanError(str(reject("crossovers", crossovers, "True or False")))
        text = (
            explain_plan(self) if node is None else explain_part(self.records, node, self.parameter_layouts)
        )
        return "\n".join([text, *crossover_lines(self.crossovers()), ""]) if crossovers else text

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

    def diff(self, other: Plan | PipelinePlan[Plan]) -> str:
        """Parameters and collectives in which two plans differ, with their prices."""
        if not isinstance(other, Plan):
            raise PlanError(str(reject("other", other, "a Plan without stages, or Plan.load(path)")))
        return plan_difference(self, other)

    def check_graph(self, joint: JointGraph) -> None:
        """PlanError, saying what changed, unless the plan was made for `joint`."""
        if not isinstance(joint, JointGraph):
            raise PlanError(str(reject("joint", joint, "the joint graph of a captured model")))
        found = graph_hash(joint)
        if found == self.origin.graph_hash:
            for problem in self._problems(compute_again(joint, self.lowering.again)):
                raise PlanError(
                    f"the plan is damaged: {problem}\n  try: find_plan(...) again and save the new plan"
                )
            return
        raise PlanError(f"the plan was made for another model, inputs or code\n{self._changes(joint)}")

    def _problems(self, joint: JointGraph) -> Iterator[str]:
        yield from records_that_differ(self.records, joint)
        yield from lowering_problems(joint, self.assignment, self.lowering)

    def _changes(self, joint: JointGraph) -> str:
        mine = {(r.op, r.text): r.results[0] for r in self.records if r.op in ("param", "buffer", "input")}
        theirs = {
            (spec.kind, f"{spec.kind} {spec.name}"): tuple(node.meta["val"].shape)
            for node, spec in zip(joint.placeholders, joint.inputs, strict=True)
            if spec.kind in ("param", "buffer", "input")
        }
        lines = [f"  {text}: in the plan, not in the model" for _, text in mine.keys() - theirs.keys()]
        lines += [f"  {text}: in the model, not in the plan" for _, text in theirs.keys() - mine.keys()]
        lines += [
            f"  {key[1]}: {tuple(mine[key].shape)} in the plan, {shape} in the model"
            for key, shape in theirs.items()
            if key in mine and tuple(mine[key].shape) != shape
        ]
        lines.sort()
        if not lines:
            from torch import __version__ as torch_version

            lines = [
                "  parameters and inputs agree; the computation differs",
                *self._ops_that_differ(joint),
                f"  plan: {self.mesh.device_type}, torch {self.origin.torch}; "
                f"here: {joint.device.type}, torch {torch_version}",
            ]
        return "\n".join([*lines[:8], "  try: find_plan(...) again and save the new plan"])

    def _ops_that_differ(self, joint: JointGraph) -> list[str]:
        ends = ("param", "buffer", "constant", "input", "tangent", "seed", "output")
        mine = Counter(f"{r.op} {r.results[0].dtype}" for r in self.records if r.op not in ends)
        here = op_counts(joint)
        return [
            f"  only {where}: " + ", ".join(f"{count} {op}" for op, count in more.most_common(6))
            for where, more in (("in the plan", mine - here), ("here", here - mine))
            if more
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON that `load` reads. PlanError where no file can be written."""
        write_plan(self.to_json(), path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan | PipelinePlan[Plan]:
        """Read a saved plan. PlanError if it is missing, not a plan, damaged, or of another schema version."""
        file = checked_path(path, "plan", PlanError)
        return any_plan_from_json(read_json(file, "plan", PlanError), where=str(file))

    def to_json(self) -> dict[str, Any]:
        return plan_to_json(self)

    @staticmethod
    def from_json(data: Any, *, where: str = "plan") -> Plan:
        """Inverse of `to_json`. PlanError for anything else: what is accepted can be shown, drawn and compared."""
        content = plan_data(data, where)
        try:
            plan = Plan(**plan_fields(content))
        except ValueError as error:  # a ShardingError of the mesh is one
            raise damaged(where, str(error).partition("\n")[0]) from None
        for problem in plan_problems(plan):
            raise damaged(where, problem)
        for records in plan.other_sizes:
            for problem in plan_problems(replace(plan, records=records)):
                raise damaged(where, f"micro-batches of another size: {problem}")
        return plan


def any_plan_from_json(data: Any, *, where: str = "plan") -> Plan | PipelinePlan[Plan]:
    """Inverse of `to_json` of either kind. Raises as `Plan.from_json`."""
    if is_pipeline(data):
        return PipelinePlan.from_json(data, Plan.from_json, where=where)
    return Plan.from_json(data, where=where)
