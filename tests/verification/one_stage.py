"""A step in pieces of a model that is one stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoshard.verification.simulated_step import StageRun, simulate_stages
from cost_model.mesh import MeshSpec
from passes.ir.joint import JointGraph
from passes.lower.piecewise import RankPieces
from passes.stages.stage_graph import StageGraph


def simulate_pieces(
    joint: JointGraph,
    pieces: Sequence[Sequence[RankPieces]],
    inputs: Sequence[Sequence[Tensor]],
    mesh: MeshSpec,
) -> list[list[Tensor | None]]:
    """Per rank the flat results of its step. pieces: of every piece, in order, per rank. inputs: per rank the values of
    placeholders."""
    names = [node.name for node in joint.placeholders]
    known = [dict(zip(names, values, strict=True)) for values in inputs]
    [found] = simulate_stages([StageRun(StageGraph.only(joint), pieces, known, mesh)], mesh)
    return [[results.get((end.kind, end.name)) for end in joint.outputs] for results in found]
