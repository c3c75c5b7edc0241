"""A step in stages and pieces of every rank, in lockstep in one process: one stage is a whole model, one piece a whole
batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from cost_model.mesh import MeshSpec
from passes.ir.autocast_off import autocast_off
from passes.lower.piece_values import given_values, leave, step_results
from passes.lower.piecewise import RankPieces
from passes.simulate.lockstep import simulate
from passes.stages.stage_graph import Leaf, StageEnds, StageGraph

Known = list[dict[str, Tensor]]
"""Per rank its values by name."""

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
        self._kept: list[list[Any]] = []
        first = stage.pieces[0]
        self._run_once([(parts.before, parts.taken, parts.made) for parts in first])

    def forward(self, piece: int, received: Passing) -> Passing:
        """Keeps per rank what the backward takes, less what comes late."""
        ranks = self._stage.pieces[piece]
        self._receive(self._ends.received, received)
        phases = [parts.piece.complete() for parts in ranks]
        early = self._given(ranks, late=False)
        results = simulate([p.forward for p in phases], early, self._mesh)
        self._kept = []
        for parts, p, own, found, values in zip(ranks, phases, early, results, self._known, strict=True):
            count = len(p.outputs)
            # Sums are made in place, and a later piece's forward may run before this one's backward.
            copies = [None if value is None else value.clone() for value in found[:count]]
            leave(parts.left[:count], copies, values)  # type: ignore[arg-type]
            backward = p.backward
            saved = [] if backward is None else [found[i] for i in backward.saved]
            self._kept.append([*(own[i] for i in (() if backward is None else backward.passed)), *saved])
        return self._taken(piece, self._ends.sent)

    def backward(self, piece: int, returned: Passing) -> Passing:
        ranks = self._stage.pieces[piece]
        self._receive(self._ends.returned, returned)
        phases = [parts.piece.complete() for parts in ranks]
        backwards = [one.backward for one in phases if one.backward is not None]
        if backwards:
            late = self._given(ranks, late=True)
            inputs = [[*kept, *own] for kept, own in zip(self._kept, late, strict=True)]
            gradients = simulate([backward.module for backward in backwards], inputs, self._mesh)
            for parts, p, found, values in zip(ranks, phases, gradients, self._known, strict=True):
                leave(parts.left[len(p.outputs) :], found, values)  # type: ignore[arg-type]
        return self._taken(piece, self._ends.given_back)

    def finish(self) -> list[Mapping[Leaf, Tensor]]:
        first = self._stage.pieces[0]
        self._run_once([(parts.after, parts.read, parts.ended) for parts in first])
        names = [node.name for node in self._stage.graph.joint.placeholders]
        found: list[Mapping[Leaf, Tensor]] = []
        for parts, values in zip(first, self._known, strict=True):
            results = step_results(parts, values, names)
            named = ((leaf, results[place]) for place, leaf in self._ends.results.items())
            found.append({leaf: value for leaf, value in named if value is not None})
        return found

    def _run_once(self, ranks: Sequence[tuple[fx.GraphModule, Sequence[str], Sequence[str]]]) -> None:
        """Per rank a program, the names of what it reads, and of what it makes."""
        read = [[v[name] for name in taken] for v, (_, taken, _) in zip(self._known, ranks, strict=True)]
        results = simulate([module for module, *_ in ranks], read, self._mesh)
        for values, (*_, made), found in zip(self._known, ranks, results, strict=True):
            values.update(zip(made, found, strict=True))

    def _given(self, ranks: Sequence[RankPieces], *, late: bool) -> list[list[Tensor]]:
        """Per rank the inputs of a piece's forward; late: its tangents."""
        found: list[list[Tensor]] = []
        for parts, values in zip(ranks, self._known, strict=True):
            pairs = zip(parts.given, parts.piece.inputs, strict=True)
            found.append(
                given_values([one for one, spec in pairs if (spec.kind == "tangent") == late], values)
            )
        return found

    def _receive(self, names: Sequence[str], passing: Passing) -> None:
        for values, own in zip(self._known, passing, strict=True):
            values.update(zip(names, own, strict=True))

    def _taken(self, piece: int, places: Sequence[int]) -> Passing:
        ranks = zip(self._stage.pieces[piece], self._known, strict=True)
        return [
            [values[name] for place in places if (name := parts.results[place]) is not None]
            for parts, values in ranks
        ]
