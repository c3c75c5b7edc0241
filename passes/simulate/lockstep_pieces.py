"""A step in pieces of every rank, in lockstep in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from cost_model.mesh import MeshSpec
from passes.lower.piece_values import given_values, leave, step_results
from passes.lower.piecewise import RankPieces
from passes.simulate.lockstep import simulate

__all__ = ["simulate_pieces"]

Known = list[dict[str, Tensor]]
"""Per rank its values by name."""


def simulate_pieces(
    pieces: Sequence[Sequence[RankPieces]],
    names: Sequence[str],
    inputs: Sequence[Sequence[Tensor]],
    mesh: MeshSpec,
) -> list[list[Tensor | None]]:
    """Per rank the flat results of its step. pieces: of every piece, in order, per rank. names: of the placeholders of
    a rank's graph; inputs: per rank their values."""
    first = pieces[0]
    known: Known = [dict(zip(names, values, strict=True)) for values in inputs]
    taken = [[values[name] for name in parts.taken] for parts, values in zip(first, known, strict=True)]
    _run(mesh, [parts.before for parts in first], taken, known, [parts.made for parts in first])
    for ranks in pieces:
        _run_piece(mesh, ranks, known)
    read = [[values[name] for name in parts.read] for parts, values in zip(first, known, strict=True)]
    _run(mesh, [parts.after for parts in first], read, known, [parts.ended for parts in first])
    return [step_results(parts, values, names) for parts, values in zip(first, known, strict=True)]


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


def _run_piece(mesh: MeshSpec, ranks: Sequence[RankPieces], known: Known) -> None:
    given = [given_values(parts.given, values) for parts, values in zip(ranks, known, strict=True)]
    phases = [parts.piece.complete() for parts in ranks]
    early = [
        [value for value, spec in zip(row, parts.piece.inputs, strict=True) if spec.kind != "tangent"]
        for row, parts in zip(given, ranks, strict=True)
    ]
    forward = simulate([p.forward for p in phases], early, mesh)
    found = [list(results[: len(p.outputs)]) for results, p in zip(forward, phases, strict=True)]
    backwards = [one.backward for one in phases if one.backward is not None]
    if backwards:
        late: list[list[Any]] = []
        for row, parts, own, results, backward in zip(given, ranks, early, forward, backwards, strict=True):
            tangents = [v for v, spec in zip(row, parts.piece.inputs, strict=True) if spec.kind == "tangent"]
            saved = [*(own[i] for i in backward.passed), *(results[i] for i in backward.saved)]
            late.append([*saved, *tangents])
        gradients = simulate([b.module for b in backwards], late, mesh)
        found = [[*one, *more] for one, more in zip(found, gradients, strict=True)]
    for parts, results, values in zip(ranks, found, known, strict=True):
        leave(parts.left, results, values)
