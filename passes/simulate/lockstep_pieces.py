"""A step in pieces of every rank, in lockstep in one process."""

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
Ranks = Sequence[RankPieces]
"""One piece, per rank."""


def simulate_pieces(
    pieces: Sequence[Ranks],
    names: Sequence[str],
    inputs: Sequence[Sequence[Tensor]],
    mesh: MeshSpec,
) -> list[list[Tensor | None]]:
    """Per rank the flat results of its step. pieces: of every piece, in order, per rank. names: of the placeholders of
    a rank's graph; inputs: per rank their values."""
    first = pieces[0]
    known: Known = [dict(zip(names, values, strict=True)) for values in inputs]
    run_before(mesh, first, known)
    for ranks in pieces:
        piece_backward(mesh, ranks, known, piece_forward(mesh, ranks, known))
    run_after(mesh, first, known)
    return [step_results(parts, values, names) for parts, values in zip(first, known, strict=True)]


def run_before(mesh: MeshSpec, ranks: Ranks, known: Known) -> None:
    taken = [[values[name] for name in parts.taken] for parts, values in zip(ranks, known, strict=True)]
    _run(mesh, [parts.before for parts in ranks], taken, known, [parts.made for parts in ranks])


def run_after(mesh: MeshSpec, ranks: Ranks, known: Known) -> None:
    read = [[values[name] for name in parts.read] for parts, values in zip(ranks, known, strict=True)]
    _run(mesh, [parts.after for parts in ranks], read, known, [parts.ended for parts in ranks])


def piece_forward(mesh: MeshSpec, ranks: Ranks, known: Known) -> list[list[Any]]:
    """Adds to `known` what it leaves; returns per rank what its backward takes, less the tangents."""
    phases = [parts.piece.complete() for parts in ranks]
    early = [_given(parts, values, late=False) for parts, values in zip(ranks, known, strict=True)]
    results = simulate([p.forward for p in phases], early, mesh)
    kept: list[list[Any]] = []
    for parts, p, own, found, values in zip(ranks, phases, early, results, known, strict=True):
        count = len(p.outputs)
        # Sums are made in place, and a later piece's forward may run before this one's backward.
        copies = [None if value is None else value.clone() for value in found[:count]]
        leave(parts.left[:count], copies, values)  # type: ignore[arg-type]
        backward = p.backward
        saved = [] if backward is None else [found[i] for i in backward.saved]
        kept.append([*(own[i] for i in (() if backward is None else backward.passed)), *saved])
    return kept


def piece_backward(mesh: MeshSpec, ranks: Ranks, known: Known, kept: Sequence[list[Any]]) -> None:
    """Adds to `known` what it leaves. kept: as `piece_forward` returned it."""
    phases = [parts.piece.complete() for parts in ranks]
    backwards = [one.backward for one in phases if one.backward is not None]
    if not backwards:
        return
    inputs = [
        [*own, *_given(parts, values, late=True)]
        for own, parts, values in zip(kept, ranks, known, strict=True)
    ]
    gradients = simulate([backward.module for backward in backwards], inputs, mesh)
    for parts, p, found, values in zip(ranks, phases, gradients, known, strict=True):
        leave(parts.left[len(p.outputs) :], found, values)  # type: ignore[arg-type]


def _given(parts: RankPieces, values: dict[str, Tensor], *, late: bool) -> list[Tensor]:
    """The inputs of a piece's forward; late: its tangents."""
    pairs = zip(parts.given, parts.piece.inputs, strict=True)
    return given_values([one for one, spec in pairs if (spec.kind == "tangent") == late], values)


def _run(
    mesh: MeshSpec,
    modules: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    known: Known,
    made: Sequence[Sequence[str]],
) -> None:
    results = simulate(modules, inputs, mesh)
    for values, names, found in zip(known, made, results, strict=True):
        values.update(zip(names, found, strict=True))


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
