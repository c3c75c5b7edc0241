"""All programs of a step whose batch is run in pieces, compiled, and the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from autoshard.runtime.compiled_pieces import CompiledEnds, CompiledPiece
from autoshard.runtime.observe import InPieces, Observer, PhaseRun, observed
from autoshard.runtime.piece_compiler import Compiler, Known
from passes.lower.piece_values import step_results
from passes.lower.piecewise import RankPieces, split_pieces

__all__ = ["StepInPieces", "parts_of"]


def parts_of(step: InPieces, *, joined: bool) -> list[RankPieces]:
    """Of every piece. joined: as they run op by op; a compiler joins more itself."""
    parts = [split_pieces(program) for program in step.programs]
    return [one.joined() for one in parts] if joined else parts


class StepInPieces:
    """What runs before the pieces counts to the first one's forward, what runs after them to the last one's backward,
    for observers: they are told of the forward and the backward of every piece."""

    def __init__(self, step: InPieces, compile_: Compiler) -> None:
        self._step = step
        parts = parts_of(step, joined=compile_.joins)
        self._first = parts[0]
        self._ends = CompiledEnds(parts[0], compile_)
        self._pieces = [CompiledPiece(one, compile_) for one in parts]

    def run(self, known: Known, observers: Sequence[Observer] = ()) -> list[Tensor | None]:
        """The results of the step. known: values of `leaves`, to which all that is made is added."""
        inputs = tuple(known[name] for name in self._step.leaves)
        for place, piece in enumerate(self._pieces):
            last = place == len(self._pieces) - 1
            told = lambda phase, last=last: observed(
                observers, lambda: PhaseRun(phase, self._step, inputs, last)
            )
            with told("forward"):
                if place == 0:
                    self._ends.before(known)
                kept = piece.forward(known)
            with told("backward") if piece.backward_graph is not None else nullcontext():
                piece.backward(known, kept)
                if last:
                    self._ends.after(known)
        return step_results(self._first, known, self._step.leaves)
