"""A whole step on simulated ranks, as it runs: forward and backward apart, collectives merged and ordered."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.plan.plan import Plan
from cost_model.mesh import MeshSpec
from passes.ir.joint import GraphOutput, JointGraph
from passes.lower.missing_tangents import missing_tangents
from passes.lower.phases import Backward
from passes.lower.piecewise import split_pieces
from passes.lower.rank_program import RankProgram, rank_program
from passes.simulate.lockstep import simulate, simulated_groups
from passes.simulate.lockstep_pieces import simulate_pieces

Values = list[torch.Tensor | None]


def simulated_results(
    joint: JointGraph, plan: Plan, shards: Sequence[Sequence[torch.Tensor]]
) -> Sequence[Values]:
    """Per rank the flat results of `joint`, the graph that `plan` is of, from its shards of the placeholders."""
    pieces = rank_programs(joint, plan)
    if joint.pieces == 1:
        return simulated_step(joint, pieces[0], shards, plan.mesh)
    names = [node.name for node in joint.placeholders]
    return simulate_pieces([[split_pieces(p) for p in ranks] for ranks in pieces], names, shards, plan.mesh)


def rank_programs(joint: JointGraph, plan: Plan) -> list[list[RankProgram]]:
    """Per piece of a batch, or of all of it, every rank's program."""
    mesh, groups = plan.mesh, simulated_groups(plan.mesh)
    return [
        [rank_program(graph, layouts, lowering, mesh, rank, groups) for rank in range(mesh.device_count)]
        for graph, layouts, lowering in plan.of_pieces(joint)
    ]


def usual_tangents(joint: JointGraph, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`values` of the placeholders of `joint`, with 0 as gradients of outputs that get none in a usual step."""
    missing = missing_tangents(joint)
    pairs = zip(joint.placeholders, values, strict=True)
    return [torch.zeros_like(value) if node in missing else value for node, value in pairs]


def simulated_step(
    joint: JointGraph,
    programs: Sequence[RankProgram],
    shards: Sequence[Sequence[torch.Tensor]],
    mesh: MeshSpec,
) -> list[Values]:
    """Per rank the flat results of `joint`, from that rank's `shards` of its placeholders.

    All outputs get a gradient. Raises LockstepError if the ranks' collectives disagree: for real, they would hang.
    """
    phases = [program.phases for program in programs]
    is_tangent = [spec.kind == "tangent" for spec in joint.inputs]
    leaves = [[v for v, t in zip(values, is_tangent, strict=True) if not t] for values in shards]
    forwards = simulate([p.forward for p in phases], leaves, mesh)
    found = [_by_spec(p.outputs, flat) for p, flat in zip(phases, forwards, strict=True)]
    if any(p.backward is not None for p in phases):
        ordered = [program.backward() for program in programs]
        inputs = [
            _backward_inputs(joint, backward, mine, flat, values)
            for backward, mine, flat, values in zip(ordered, leaves, forwards, shards, strict=True)
        ]
        backwards = simulate([backward.module for backward in ordered], inputs, mesh)
        for backward, results, flat in zip(ordered, found, backwards, strict=True):
            results.update(_by_spec(backward.gradients, flat))
    return [[results.get((spec.kind, spec.index)) for spec in joint.outputs] for results in found]


def _backward_inputs(
    joint: JointGraph,
    backward: Backward,
    leaves: Sequence[torch.Tensor],
    forward: Sequence[torch.Tensor | None],
    shards: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    tangents = {
        spec.index: value for spec, value in zip(joint.inputs, shards, strict=True) if spec.kind == "tangent"
    }
    saved = [forward[i] for i in backward.saved]
    return [
        *(leaves[i] for i in backward.passed),
        *(value for value in saved if value is not None),
        *(tangents[spec.index] for spec in backward.tangents),
    ]


def _by_spec(
    specs: Sequence[GraphOutput], flat: Sequence[torch.Tensor | None]
) -> dict[tuple[str, int], torch.Tensor | None]:
    """Results by (kind, index); what follows them in `flat` is saved for the backward."""
    return {(spec.kind, spec.index): value for spec, value in zip(specs, flat, strict=False)}
