"""A step whose batch is run in pieces, run op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autoshard.reporting.probe import Probed
from autoshard.reporting.timed_phases import TimedGraph, TimedPhases
from autoshard.reporting.timed_run import TimedRun
from autoshard.runtime.compiled_pieces import by_phase
from autoshard.runtime.observe import Marks
from passes.lower.piece_values import given_values, leave
from passes.lower.piecewise import RankPieces

__all__ = ["PiecesProbe"]


class PiecesProbe:
    """Computing is that of all pieces. Collectives are, as in the prediction, those before the pieces, of the first
    piece, and after them.

    parts: of every piece. known: values of a step's placeholders.
    """

    def __init__(self, parts: Sequence[RankPieces], known: Mapping[str, Tensor], marks: Marks) -> None:
        self._known, self._first = known, parts[0]
        self._before, self._after = (TimedGraph(g, marks) for g in (parts[0].before, parts[0].after))
        self._pieces = [_Piece(one, marks) for one in parts]

    @torch.no_grad()
    def __call__(self) -> Probed:
        known, first = dict(self._known), self._first
        before, made = self._before.run([known[name] for name in first.taken])
        known.update(zip(first.made, made, strict=True))
        forward, backward = [before], list[TimedRun]()
        for piece in self._pieces:
            ran, again = piece.run(known)
            forward.append(ran)
            backward += again
        after, _ = self._after.run([known[name] for name in first.read])
        told = (*forward[:2], *backward[:1], after)
        (backward if backward else forward).append(after)
        phases = {"forward": forward, "backward": backward}
        return Probed(
            tuple(seconds for run in told for seconds in run.collectives()),
            {name: sum(run.compute() for run in runs) for name, runs in phases.items() if runs},
        )


class _Piece:
    def __init__(self, parts: RankPieces, marks: Marks) -> None:
        self._left = parts.left
        self._given, self._tangents = by_phase(parts.given, parts.piece)
        phases = parts.piece.complete()
        self._outputs = len(phases.outputs)
        self._timed = TimedPhases(phases, marks)

    def run(self, known: dict[str, Tensor]) -> tuple[TimedRun, list[TimedRun]]:
        """Of the forward, and of the backward if there is one. known: what the piece leaves is added."""
        inputs = given_values(self._given, known)
        forward, results = self._timed.forward.run(inputs)
        ran = self._timed.backward(inputs, results, given_values(self._tangents, known))
        # The backward has read them: what is left may be added up in place.
        leave(self._left[: self._outputs], results[: self._outputs], known)
        if ran is None:
            return forward, []
        leave(self._left[self._outputs :], ran[1], known)
        return forward, [ran[0]]
