"""A plan with stages against the unsharded model: all stages and ranks in lockstep, every result compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from autoshard.plan.plan import PipelinePlan, Plan
from autoshard.plan.plan_ends import result_layouts
from autoshard.verification.part_errors import Held, held_value, result_errors
from autoshard.verification.simulated_step import rank_programs
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.lower.one_piece import pieces_of
from passes.simulate.lockstep_stages import StageInLockstep, simulate_stages
from passes.stages.stage_graph import Leaf, StageEnds, StageGraph
from passes.stages.stage_graphs import stage_graphs


def stage_errors(
    joint: JointGraph,
    plan: PipelinePlan,
    values: Sequence[Tensor],
    wanted: Sequence[Tensor | None],
    least: Sequence[float],
) -> dict[str, float]:
    """Relative error by result. joint: of the call, in pieces, as `plan` cuts it. values: of its placeholders, whole.
    wanted: its results. least: per result, the least scale that an error is relative to."""
    mesh = plan.mesh.resized(plan.axis, 1)
    known = {(spec.kind, spec.name): value for spec, value in zip(joint.inputs, values, strict=True)}
    graphs = stage_graphs(joint, plan.cut)
    stages = [
        _in_lockstep(graph, stage, known, mesh) for graph, stage in zip(graphs, plan.stages, strict=True)
    ]
    found = simulate_stages(stages, mesh)
    layouts = [_layouts(graph, stage) for graph, stage in zip(graphs, plan.stages, strict=True)]
    results: list[Held | None] = []
    for spec in joint.outputs:
        leaf = spec.kind, spec.name
        at = [i for i, ranks in enumerate(found) if leaf in ranks[0]]
        # Of a parameter in several stages each has a part of the gradient.
        parts = [
            sum((found[i][rank][leaf] for i in at[1:]), found[at[0]][rank][leaf])
            for rank in range(mesh.device_count if at else 0)
        ]
        results.append((parts, layouts[at[0]][leaf]) if at else None)
    return result_errors(joint, results, wanted, least, mesh)


def _in_lockstep(
    graph: StageGraph, stage: Plan, values: Mapping[Leaf, Tensor], mesh: MeshSpec
) -> StageInLockstep:
    ends = StageEnds.of(graph)
    given = {name: values[leaf] for leaf, name in ends.leaves.items()}
    given |= {name: values["tangent", f"tangent {index}"] for index, name in ends.tangents.items()}
    known = [
        {
            name: held_value(value, stage.assignment[name].results[0], mesh, rank)
            for name, value in given.items()
        }
        for rank in range(mesh.device_count)
    ]
    pieces = [
        [pieces_of(program, graph.joint.pieces) for program in ranks]
        for ranks in rank_programs(graph.joint, stage)
    ]
    return StageInLockstep(graph, pieces, known)


def _layouts(graph: StageGraph, stage: Plan) -> dict[Leaf, Layout]:
    """Of the results that are not passed on."""
    named = StageEnds.of(graph).results
    layouts = enumerate(result_layouts(graph.joint.results, stage.assignment))
    return {named[place]: layout for place, layout in layouts if layout is not None and place in named}
