"""From a plan with stages to the program of a rank, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.calls.call_ends import CallEnds, input_sides, output_shapes, returned_as
from autoshard.calls.checks import Checks
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_fits import axes_in, runnable
from autoshard.plan.task import CallLayouts
from autoshard.runtime.agreement import collectively
from autoshard.runtime.devices import local_device
from autoshard.runtime.input_side import InputSide, OutputSide
from autoshard.runtime.making import Made, Making, Workshop, schedule_for, together
from autoshard.runtime.parameters import Place
from autoshard.runtime.pipeline_program import PipelineEnds, PipelineProgram
from autoshard.runtime.process_groups import groups_for
from autoshard.runtime.stage_mesh import holders_mesh
from autoshard.runtime.stage_parameters import StagePlaced, distribute_stage_parameters, stage_places
from autoshard.runtime.stage_run import StageOnRank
from autoshard.watching.kinds import turns_of
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.lower.rank_program import RankProgram, rank_program
from passes.micro_batches.cut_batch import cut_for_stages
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs

__all__ = ["PipelineMaking", "making_of"]

StagesPlan = PipelinePlan


class PipelineMaking:
    """Of plans in which the ranks along an axis of the mesh run stages."""

    def __init__(self, home: Workshop, plan: StagesPlan) -> None:
        self._home, self._plan = home, plan

    def cut(self, captured: Captured) -> Captured:
        """The call's graph in pieces; the plan says where it is cut into stages."""
        return replace(captured, joint=cut_for_stages(captured.joint, self._plan.micro_batches))

    def place(self) -> None:
        """Make the parameters DTensors, each on the ranks of the stages that read it."""
        distribute_stage_parameters(self._home.model, self._home.mesh, self._plan.axis, self._placed())

    def places(self) -> dict[str, Place]:
        """Where `place` puts each parameter. On all ranks together: meshes are made of the ranks of stages."""
        return stage_places(self._home.mesh, self._plan.axis, self._placed())

    def _placed(self) -> dict[str, StagePlaced]:
        plan = self._plan
        return {name: StagePlaced(plan.holders[name], placed) for name, placed in plan.parameters.items()}

    def ends(self, captured: Captured, layouts: CallLayouts) -> CallEnds:
        """An output that is not asked for whole stays on the ranks of its stage."""
        plan = self._plan
        outputs: list[OutputSide] = []
        for index, shape in output_shapes(captured.joint).items():
            layout = plan.outputs[index]
            assert layout is not None
            kind = returned_as(index, layouts.outputs)
            holder = (plan.returned_by[index] % plan.ranks,)
            mesh = holders_mesh(self._home.mesh, plan.axis, holder) if kind == "dtensor" else None
            outputs.append(OutputSide(shape, layout, kind, mesh))
        return CallEnds(_sides(captured.joint, plan), tuple(outputs))

    def made(self, captured: Captured, kind: str) -> Made:
        """captured: as it was cut."""
        home, plan = self._home, self._plan
        groups_for(home.mesh, _axes(plan))
        graphs = stage_graphs(captured.joint, plan.cut)
        ours = collectively(home.mesh, lambda: self._lowered(graphs), what="lowering a plan")
        ends = self._ends(captured, graphs)
        turn, checks = turns_of(home.watch, kind), Checks(captured.call)

        def compiled(backend: str) -> PipelineProgram:
            clocks = home.stage_clocks
            return PipelineProgram(ends, ours, len(graphs), plan.schedule, backend, turn, clocks, checks)

        return together(home, kind, compiled)

    def _lowered(self, graphs: Sequence[StageGraph]) -> list[StageOnRank]:
        """The stages of this rank."""
        plan = self._plan
        own = _coordinate(self._home, plan)
        return [
            StageOnRank(graph, tuple(self._programs(graph, stage)))
            for graph, stage in zip(graphs, plan.stages, strict=True)
            if graph.stage % plan.ranks == own
        ]

    def _programs(self, graph: StageGraph, stage: Plan) -> list[RankProgram]:
        groups = groups_for(self._home.mesh, _axes(self._plan))
        schedule = schedule_for(axes_in(stage), len(stage.communicators))
        spec, rank = _stage_place(self._home, self._plan)
        with runnable(stage):
            return [
                rank_program(joint, layouts, lowering, spec, rank, groups, schedule=schedule)
                for joint, layouts, lowering in stage.of_pieces(graph.joint)
            ]

    def _ends(self, captured: Captured, graphs: Sequence[StageGraph]) -> PipelineEnds:
        home, plan = self._home, self._plan
        spec, rank = _stage_place(home, plan)
        outputs = {i: (stage % plan.ranks, plan.outputs[i]) for i, stage in plan.returned_by.items()}
        changed = {
            end.name: graph.stage % plan.ranks
            for graph in graphs
            for end in graph.joint.outputs
            if end.kind == "buffer"
        }
        return PipelineEnds(
            captured.joint,
            spec,
            rank,
            {i: (at, layout) for i, (at, layout) in outputs.items() if layout is not None},
            changed,
            _sides(captured.joint, plan),
            plan.axis,
            home.mesh.get_group(plan.axis),
            local_device(home.mesh),
        )


def making_of(home: Workshop, plan: Plan | StagesPlan) -> Making | PipelineMaking:
    """How programs of such a plan are made."""
    return PipelineMaking(home, plan) if isinstance(plan, PipelinePlan) else Making(home, plan)


def _axes(plan: StagesPlan) -> list[tuple[str, ...]]:
    """Of the collectives of all stages, alike on every rank."""
    return sorted({axes for stage in plan.stages for axes in axes_in(stage)})


def _coordinate(home: Workshop, plan: StagesPlan) -> int:
    """Of this rank along the axis of the stages."""
    return home.mesh.get_local_rank(plan.axis)


def _stage_place(home: Workshop, plan: StagesPlan) -> tuple[MeshSpec, int]:
    """The mesh of one stage, and this rank's place in it."""
    others = [axis for axis in plan.mesh.names if axis != plan.axis]
    return plan.mesh.resized(plan.axis, 1), plan.mesh.linear_index(home.mesh.get_rank(), others)


def _sides(joint: JointGraph, plan: StagesPlan) -> tuple[InputSide, ...]:
    """Parameters as their stages hold them."""
    known: dict[str, Layout] = {}
    inputs: Mapping[int, Layout] = plan.inputs
    for node, spec in zip(joint.placeholders, joint.inputs, strict=True):
        if spec.kind == "param" and spec.name in plan.parameter_layouts:
            known[node.name] = plan.parameter_layouts[spec.name]
        elif spec.kind == "input" and spec.index in inputs:
            known[node.name] = inputs[spec.index]
    return input_sides(joint, known)
