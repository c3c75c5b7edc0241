"""A step of all stages of a pipeline and all their ranks, in lockstep in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cost_model.mesh import MeshSpec
from passes.ir.autocast_off import autocast_off
from passes.lower.piece_values import step_results
from passes.lower.piecewise import RankPieces
from passes.simulate.lockstep_pieces import Known, piece_backward, piece_forward, run_after, run_before
from passes.stages.stage_graph import Leaf, StageEnds, StageGraph

Passing = list[list[Tensor]]
"""Per rank what passes between two stages."""


@dataclass(frozen=True)
class StageInLockstep:
    """pieces: of every piece, in order, per rank of the stage. known: per rank the values of `StageEnds.leaves` and
    `tangents`, by name."""

    graph: StageGraph
    pieces: Sequence[Sequence[RankPieces]]
    known: Known


@autocast_off()
def simulate_stages(stages: Sequence[StageInLockstep], mesh: MeshSpec) -> list[list[Mapping[Leaf, Tensor]]]:
    """Per stage and rank its results, by kind and name in the whole graph. mesh: of one stage."""
    runs = [_Run(stage, mesh) for stage in stages]
    for piece in range(len(stages[0].pieces)):
        passing: Passing = [[] for _ in range(mesh.device_count)]
        for run in runs:
            passing = run.forward(piece, passing)
        passing = [[] for _ in range(mesh.device_count)]
        for run in reversed(runs):
            passing = run.backward(piece, passing)
    return [run.finish() for run in runs]


class _Run:
    def __init__(self, stage: StageInLockstep, mesh: MeshSpec) -> None:
        self._stage, self._mesh = stage, mesh
        self._ends = StageEnds.of(stage.graph)
        self._known = stage.known
        self._kept: list[list[object]] = []
        run_before(mesh, stage.pieces[0], self._known)

    def forward(self, piece: int, received: Passing) -> Passing:
        for values, own in zip(self._known, received, strict=True):
            values.update(zip(self._ends.received, own, strict=True))
        self._kept = piece_forward(self._mesh, self._stage.pieces[piece], self._known)
        return self._taken(piece, self._ends.sent)

    def backward(self, piece: int, returned: Passing) -> Passing:
        for values, own in zip(self._known, returned, strict=True):
            values.update(zip(self._ends.returned, own, strict=True))
        piece_backward(self._mesh, self._stage.pieces[piece], self._known, self._kept)
        return self._taken(piece, self._ends.given_back)

    def finish(self) -> list[Mapping[Leaf, Tensor]]:
        first = self._stage.pieces[0]
        run_after(self._mesh, first, self._known)
        names = [node.name for node in self._stage.graph.joint.placeholders]
        found: list[Mapping[Leaf, Tensor]] = []
        for parts, values in zip(first, self._known, strict=True):
            results = step_results(parts, values, names)
            named = ((leaf, results[place]) for place, leaf in self._ends.results.items())
            found.append({leaf: value for leaf, value in named if value is not None})
        return found

    def _taken(self, piece: int, places: Sequence[int]) -> Passing:
        ranks = zip(self._stage.pieces[piece], self._known, strict=True)
        return [
            [values[name] for place in places if (name := parts.results[place]) is not None]
            for parts, values in ranks
        ]
