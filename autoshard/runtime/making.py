"""From a kind of call and a plan to this rank's program, on all ranks together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.plan.micro_batches import cut_call
from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_fits import axes_in, runnable
from autoshard.plan.task import CallLayouts
from autoshard.planning import in_host_order
from autoshard.runtime.call_program import Around, CallProgram, Checks
from autoshard.runtime.compiled_pieces import program_in_pieces
from autoshard.runtime.executable import Home, Running
from autoshard.runtime.leaves import (
    CallEnds,
    Compiler,
    InputSide,
    OutputSide,
    PiecesOnRank,
    RankSides,
    input_sides,
    output_shapes,
    returned_as,
)
from autoshard.runtime.parameters import Place, StagePlaced, stage_places
from autoshard.runtime.pipeline_program import PipelineEnds, Staging
from autoshard.runtime.process_groups import groups_for, holders_mesh, local_device
from autoshard.runtime.step import PhaseCode, Program
from autoshard.runtime.trial_run import RaceEntry
from autoshard.watching.agreement import collectively
from autoshard.watching.check_calls import kind_of, turns_of
from cost_model.errors import log
from cost_model.mesh import MeshSpec
from passes.capture import Captured
from passes.compile.single_kernel import keep_freed_memory
from passes.ir.joint import JointGraph, node_value
from passes.layout.layout import Layout
from passes.lower.rank_program import RankProgram, rank_program
from passes.micro_batches.cut_batch import cut_for_stages
from passes.schedule.schedule import one_communicator_at_a_time, scheduled
from passes.stages.stage_graph import StageGraph
from passes.stages.stage_graphs import stage_graphs

Made = Callable[[str], CallProgram]
"""Compiles this rank's program by a backend, on all ranks together."""
Lowering = Callable[[], Callable[[str], CallProgram]]
"""Lowers this rank's program, and returns what compiles it, both without other ranks."""


@dataclass(frozen=True)
class Lowered:
    """A `Made`. alone: compiles by a backend, on this rank alone."""

    home: Home
    kind: str
    alone: Callable[[str], CallProgram]

    def __call__(self, backend: str) -> CallProgram:
        mesh = self.home.mesh
        with self.home.stages("compiling the plan", (self.kind, backend)):
            return collectively(mesh, lambda: prepared(self.alone(backend)), what="compiling a plan")


def prepared(program: CallProgram) -> CallProgram:
    """With all that a usual step runs."""
    deque(program.prepared(), maxlen=0)
    return program


def places_of(mesh: DeviceMesh, plan: Plan) -> dict[str, Place]:
    """Where a plan has each parameter. On all ranks together: with stages, meshes are made of the ranks of some."""
    if not isinstance(plan, PipelinePlan):
        return {name: Place(mesh, placed) for name, placed in plan.parameters.items()}
    placed = {name: StagePlaced(plan.holders[name], where) for name, where in plan.parameters.items()}
    return stage_places(mesh, plan.axis, placed)


class Call:
    """One kind of call, to be run by any of several plans. captured, layouts: of the call, whole. tensors: its own,
    flat. All ranks come to each method together, with the same plan."""

    def __init__(
        self, home: Home, captured: Captured, layouts: CallLayouts, tensors: Sequence[Tensor]
    ) -> None:
        self.home, self.whole, self.layouts, self._tensors = home, captured, layouts, tensors
        self.kind = kind_of(home.model, captured.joint)
        self._cuts: dict[object, Captured] = {}

    def cut(self, plan: Plan) -> Captured:
        """The call as the plan runs it: whole, or in pieces. Plans that cut it alike are given one graph."""
        way = plan.micro_batches, "stages" if isinstance(plan, PipelinePlan) else plan.head_pieces

        def made() -> Captured:
            if isinstance(plan, PipelinePlan):  # it says where it is cut into stages
                return replace(self.whole, joint=cut_for_stages(self.whole.joint, plan.micro_batches))
            return cut_call(self.whole, plan.micro_batches, plan.head_pieces)

        if way not in self._cuts:
            self._cuts[way] = collectively(self.home.mesh, made, what="cutting a batch")
        return self._cuts[way]

    def made(self, plan: Plan) -> Lowered:
        """Lowered; what compiles it, on all ranks or on none."""
        alone = collectively(self.home.mesh, self.lowering(plan), what="lowering a plan")
        return Lowered(self.home, self.kind, alone)

    def lowering(self, plan: Plan) -> Lowering:
        keep_freed_memory(local_device(self.home.mesh))
        return _staged(self, plan) if isinstance(plan, PipelinePlan) else _whole(self, plan)

    def ends(self, plan: Plan) -> CallEnds:
        """With stages, an output that is not asked for whole stays on the ranks of its stage."""
        return ends_of(self.home.mesh, self.cut(plan).joint, self.layouts, plan)

    def running(self, plan: Plan, program: CallProgram) -> Running:
        return Running(self.cut(plan), self.ends(plan), program, plan)

    def entry(self, plan: Plan, program: CallProgram) -> RaceEntry:
        """The plan on copies of what a training step reads and writes."""
        home, joint = self.home, self.cut(plan).joint
        sides, places = _sides(joint, plan), places_of(home.mesh, plan)
        return RaceEntry(home.model, joint, home.mesh, self._tensors, program, sides, places)


def ends_of(mesh: DeviceMesh, joint: JointGraph, layouts: CallLayouts, plan: Plan) -> CallEnds:
    outputs: list[OutputSide] = []
    for index, shape in output_shapes(joint).items():
        layout, kind, on = plan.outputs[index], returned_as(index, layouts.outputs), None
        assert layout is not None
        if isinstance(plan, PipelinePlan) and kind == "dtensor":
            on = holders_mesh(mesh, plan.axis, (plan.returned_by[index] % plan.ranks,))
        outputs.append(OutputSide(shape, layout, kind, on))
    return CallEnds(_sides(joint, plan), tuple(outputs))


def _whole(call: Call, plan: Plan) -> Lowering:
    """Every rank runs the whole model."""
    home, cut = call.home, call.cut(plan)
    groups_for(home.mesh, axes_in(plan))  # all ranks make them together
    sides = RankSides(_sides(cut.joint, plan), home.spec, home.mesh.get_rank())
    around = Around(turns_of(home.watch, call.kind), Checks(cut.call))

    def lower() -> Callable[[str], CallProgram]:
        ours = lowered_whole(home, cut.joint, plan)

        def compiled(backend: str) -> CallProgram:
            if len(ours) > 1:
                device = local_device(home.mesh)
                pieces = PiecesOnRank(ours, cut.joint.pieces, Compiler(backend))
                return program_in_pieces(pieces, sides, device, home.observers, around)
            return Program(PhaseCode(ours[0], Compiler(backend)), sides, home.observers, around)

        return compiled

    return lower


def lowered_whole(home: Home, joint: JointGraph, plan: Plan) -> list[RankProgram]:
    """This rank's program of the whole model; of a batch in pieces, of each."""
    groups = groups_for(home.mesh, axes_in(plan))
    programs = _programs(plan, joint, home.spec, dist.get_rank(), groups)
    if joint.pieces == 1:
        with runnable(plan):
            if home.settings.backend == "eager":  # not what runs op by op twice, until it is compiled
                programs = [programs[0].joined()]
            _ = programs[0].phases
    return programs


def _staged(call: Call, plan: PipelinePlan) -> Lowering:
    """The ranks along an axis of the mesh run stages."""
    home, cut = call.home, call.cut(plan)
    staging = staging_of(home.mesh, cut.joint, plan, stage_graphs(cut.joint, plan.cut))
    around = Around(turns_of(home.watch, call.kind), Checks(cut.call))

    def lower() -> Callable[[str], CallProgram]:
        ours = lowered_stages(home, staging, plan.stages)

        def compiled(backend: str) -> CallProgram:
            compile_ = Compiler(backend)
            pieces = [PiecesOnRank(programs, cut.joint.pieces, compile_) for programs in ours]
            return staging.program(pieces, home.stage_clocks, around)

        return compiled

    return lower


def staging_of(
    mesh: DeviceMesh, joint: JointGraph, plan: PipelinePlan, graphs: Sequence[StageGraph]
) -> Staging:
    """graphs: of all stages, of `joint`."""
    own = mesh.get_local_rank(plan.axis)
    ours = [graph for graph in graphs if graph.stage % plan.ranks == own]
    return Staging(_pipeline_ends(mesh, joint, plan, graphs), ours, len(graphs), plan.schedule)


def lowered_stages(home: Home, staging: Staging, plans: Sequence[Plan]) -> list[list[RankProgram]]:
    """Of each of this rank's stages the program of every piece. plans: of all stages."""
    # Of the collectives of all stages, alike on every rank.
    groups = groups_for(home.mesh, sorted({axes for stage in plans for axes in axes_in(stage)}))
    at = staging.ends.spec, staging.ends.rank, groups
    return [_programs(plans[graph.stage], graph.joint, *at) for graph in staging.graphs]


def _pipeline_ends(
    mesh: DeviceMesh, joint: JointGraph, plan: PipelinePlan, graphs: Sequence[StageGraph]
) -> PipelineEnds:
    others = [axis for axis in plan.mesh.names if axis != plan.axis]
    spec, rank = (
        plan.mesh.resized(plan.axis, 1),
        plan.mesh.linear_index(mesh.get_rank(), others),
    )  # of one stage
    changed = {
        end.name: graph.stage % plan.ranks
        for graph in graphs
        for end in graph.joint.outputs
        if end.kind == "buffer"
    }
    returned = {
        i: (stage % plan.ranks, layout)
        for i, stage in plan.returned_by.items()
        if (layout := plan.outputs[i]) is not None
    }
    sides, group = _sides(joint, plan), mesh.get_group(plan.axis)
    look = lambda node: None if node is None else node_value(node)
    kinds = zip(joint.inputs, joint.placeholders, strict=True)
    return PipelineEnds(
        joint.inputs,
        joint.outputs,
        list(map(node_value, joint.placeholders)),
        list(map(look, joint.results)),
        frozenset(end.index for end, node in kinds if end.kind == "tangent" and node.users),
        spec,
        rank,
        returned,
        changed,
        sides,
        plan.axis,
        group,
        local_device(mesh),
    )


def _programs(
    plan: Plan, joint: JointGraph, spec: MeshSpec, rank: int, groups: Mapping[tuple[str, ...], str]
) -> list[RankProgram]:
    """A rank's program of a part of the model, or of all of it; where a batch is run in pieces, of each."""
    axes, schedule = axes_in(plan), scheduled
    # Whether collectives on different communicators may be in flight together.
    if len(plan.communicators) > 1 and not in_host_order():
        schedule = one_communicator_at_a_time
        if len(axes) > 1 and dist.get_rank() == 0:
            log.warning(
                "collectives over different mesh axes will not overlap: set NCCL_LAUNCH_ORDER_IMPLICIT=1 on all "
                "ranks before init_process_group (NCCL 2.26), see docs/cuda.md"
            )
    with runnable(plan):
        return [
            rank_program(graph, planned, spec, rank, groups, schedule=schedule)
            for graph, planned in plan.of_pieces(joint)
        ]


def _sides(joint: JointGraph, plan: Plan) -> tuple[InputSide, ...]:
    """Where a call's inputs meet the program: with stages, parameters as these hold them."""
    known: dict[str, Layout] = {}
    for node, spec in joint.given:
        if not isinstance(plan, PipelinePlan):
            known[node.name] = plan.planned.layouts[node.name].results[0]
        elif spec.kind == "param" and spec.name in plan.parameter_layouts:
            known[node.name] = plan.parameter_layouts[spec.name]
        elif spec.kind == "input" and spec.index in plan.inputs:
            known[node.name] = plan.inputs[spec.index]
    return input_sides(joint, known)
