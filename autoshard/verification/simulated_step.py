"""A step on simulated ranks, as it runs: forward and backward apart, collectives merged and ordered."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autoshard.plan.plan import Plan
from autoshard.plan.plan_ends import result_layouts
from autoshard.verification.part_errors import Held, held_value, result_errors
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.layout.layout import Layout
from passes.lower.missing_tangents import missing_tangents
from passes.lower.one_piece import pieces_of
from passes.lower.rank_program import RankProgram, rank_program
from passes.simulate.lockstep import simulated_groups
from passes.simulate.lockstep_pieces import StageInLockstep, simulate_stages
from passes.stages.stage_graph import Leaf, StageEnds, StageGraph
from passes.stages.stage_graphs import stage_graphs


def rank_programs(joint: JointGraph, plan: Plan) -> list[list[RankProgram]]:
    """Per piece of a batch, or of all of it, every rank's program."""
    mesh, groups = plan.mesh, simulated_groups(plan.mesh)
    return [
        [rank_program(graph, planned, mesh, rank, groups) for rank in range(mesh.device_count)]
        for graph, planned in plan.of_pieces(joint)
    ]


def usual_tangents(joint: JointGraph, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`values` of the placeholders of `joint`, with 0 as gradients of outputs that get none in a usual step."""
    missing = missing_tangents(joint)
    pairs = zip(joint.placeholders, values, strict=True)
    return [torch.zeros_like(value) if node in missing else value for node, value in pairs]


def step_errors(
    joint: JointGraph,
    plan: Plan,
    values: Sequence[Tensor],
    wanted: Sequence[Tensor | None],
    least: Sequence[float],
) -> dict[str, float]:
    """Relative error by result. joint: of the call, in pieces, as `plan` cuts it. values: of its placeholders, whole.
    wanted: its results. least: per result, the least scale that an error is relative to.

    All outputs get a gradient. Raises LockstepError if the ranks' collectives disagree: for real, they would hang.
    """
    mesh = plan.mesh.resized(plan.axis, 1) if plan.axis else plan.mesh
    known = {(spec.kind, spec.name): value for spec, value in zip(joint.inputs, values, strict=True)}
    graphs = stage_graphs(joint, plan.cut) if plan.axis else (StageGraph.only(joint),)
    stages = list(zip(graphs, plan.stages, strict=True))
    found = simulate_stages([_in_lockstep(graph, stage, known, mesh) for graph, stage in stages], mesh)
    layouts = [_layouts(graph, stage) for graph, stage in stages]
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
    ends, joint = StageEnds.of(graph), graph.joint
    given = {name: values[leaf] for leaf, name in ends.leaves.items()}
    given |= {name: values["tangent", f"tangent {index}"] for index, name in ends.tangents.items()}
    pieces = [
        [pieces_of(program, joint.pieces) for program in ranks] for ranks in rank_programs(joint, stage)
    ]
    return StageInLockstep(graph, pieces, held_values(given, stage, mesh))


def held_values(given: Mapping[str, Tensor], plan: Plan, mesh: MeshSpec) -> list[dict[str, Tensor]]:
    """Per rank what it holds of values of placeholders, by name."""
    layouts = {name: plan.planned.layouts[name].results[0] for name in given}
    return [
        {name: held_value(value, layouts[name], mesh, rank) for name, value in given.items()}
        for rank in range(mesh.device_count)
    ]


def _layouts(graph: StageGraph, stage: Plan) -> dict[Leaf, Layout]:
    """Layouts of the results that are not passed on."""
    named = StageEnds.of(graph).results
    layouts = enumerate(result_layouts(graph.joint.results, stage.planned.layouts))
    return {named[place]: layout for place, layout in layouts if layout is not None and place in named}


@contextmanager
def full_float32() -> Generator[None]:
    """Products and convolutions in float32 keep all its digits inside. Also a decorator.

    cuDNN's convolutions are allowed TensorFloat-32 unless told otherwise, ten bits: then a program that is right
    differs from the model by 3e-4, as one that is wrong might. [torch's notes on CUDA, TensorFloat-32]
    """
    cudnn: Any = torch.backends.cudnn  # torch names neither to type checkers
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    with _old_flag_off(cudnn):
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


@contextmanager
def _old_flag_off(cudnn: Any) -> Generator[None]:
    """A model that reads the flag from before there were precisions, as `torch.backends.cudnn.flags()` does, gets an
    error where it says another thing than these."""
    try:
        before = cudnn.allow_tf32
    except RuntimeError:  # it does so outside, too
        yield
        return
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
