"""What runs before the pieces of a batch, forward and backward of each, and what runs after, compiled for a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.runtime.gradient_program import GradientProgram
from autoshard.runtime.input_side import conform
from autoshard.runtime.piece_compiler import Compiler, Known
from passes.lower.phases import Backward
from passes.lower.piece_values import IN_PLACE, given_values, leave
from passes.lower.piecewise import PieceInput, RankPieces
from passes.lower.rank_program import RankProgram
from passes.stages.split_backward import BackwardHalves, split_backward

__all__ = ["CompiledEnds", "CompiledPiece", "by_phase"]


class CompiledEnds:
    """What runs before the pieces and after them."""

    def __init__(self, parts: RankPieces, compile_: Compiler) -> None:
        self._parts = parts
        self._before, self._takes = compile_(parts.before)
        self._after, self._reads = compile_(parts.after)

    def before(self, known: Known) -> None:
        taken = [conform(known[n], like) for n, like in zip(self._parts.taken, self._takes, strict=True)]
        known.update(zip(self._parts.made, self._before(taken), strict=True))  # type: ignore[arg-type]

    def after(self, known: Known) -> None:
        read = [conform(known[n], like) for n, like in zip(self._parts.read, self._reads, strict=True)]
        known.update(zip(self._parts.ended, self._after(read), strict=True))  # type: ignore[arg-type]


class CompiledPiece:
    """Forward and backward of a piece. `halves` of the backward are made where they are asked for.

    What a forward keeps is given to the backward, which may run when other pieces have run in between.
    """

    def __init__(self, parts: RankPieces, compile_: Compiler) -> None:
        self._parts = parts
        self._compile = compile_
        phases = parts.piece.complete()
        self._inputs = by_phase(parts.given, parts.piece)
        self._outputs = len(phases.outputs)
        self._forward, self._takes = compile_(phases.forward)
        self.backward_graph: Backward | None = phases.backward
        if phases.backward is not None:
            self._backward = GradientProgram(phases.backward.module, parts.left[self._outputs :], compile_)
        self._halves: BackwardHalves | None = None

    def forward(self, known: Known) -> list[Any]:
        """Adds to `known` what it leaves; returns what its backward takes, less the tangents."""
        given = given_values(self._inputs[0], known)
        early = [conform(value, like) for value, like in zip(given, self._takes, strict=True)]
        results = self._forward(list(early))
        backward = self.backward_graph
        saved = set() if backward is None else set(backward.saved)
        # Sums are made in place, and the backward of this piece may run after other pieces' forwards.
        left = self._parts.left[: self._outputs]
        found = [
            value.clone() if place in saved and one.how in IN_PLACE and value is not None else value
            for place, (one, value) in enumerate(zip(left, results[: self._outputs], strict=True))
        ]
        leave(left, found, known)  # type: ignore[arg-type]
        if backward is None:
            return []
        return [*(early[i] for i in backward.passed), *(results[i] for i in backward.saved)]

    def backward(self, known: Known, kept: list[Any]) -> None:
        """Adds to `known` what it leaves. kept: as `forward` returned it; emptied."""
        if self.backward_graph is not None:
            self._backward(self._given_back(known, kept), known)

    def backward_input(self, known: Known, kept: list[Any], first: Sequence[str]) -> list[Any]:
        """The gradients that leave by the names `first` alone; returns what `backward_weight` takes."""
        if self.backward_graph is None:
            return []
        halves = self._split(first)
        inputs = self._given_back(known, kept)
        later = [inputs[i] for i in halves.given]
        found = list(self._run_input(inputs))
        count = len(halves.first)
        self._leave(halves.first, found[:count], known)
        return later + found[count:]

    def backward_weight(self, known: Known, kept: list[Any]) -> None:
        """All other gradients. kept: as `backward_input` returned it; emptied."""
        if self.backward_graph is not None:
            assert self._halves is not None, "backward_weight follows backward_input"
            inputs = [conform(value, like) for value, like in zip(kept, self._weight.takes, strict=True)]
            kept.clear()
            self._weight(inputs, known)

    def _split(self, first: Sequence[str]) -> BackwardHalves:
        if self._halves is None:
            assert self.backward_graph is not None
            left = self._parts.left[self._outputs :]
            ends = zip(self.backward_graph.gradients, left, strict=True)
            early = {end.name for end, one in ends if one.name in first}
            self._halves = split_backward(self.backward_graph, early)
            self._run_input, _ = self._compile(self._halves.input)
            second = [left[place] for place in self._halves.second]
            self._weight = GradientProgram(self._halves.weight, second, self._compile)
        return self._halves

    def _given_back(self, known: Known, kept: list[Any]) -> list[Any]:
        tangents = given_values(self._inputs[1], known)
        given = zip([*kept, *tangents], self._backward.takes, strict=True)
        inputs = [conform(value, like) for value, like in given]
        kept.clear()
        return inputs

    def _leave(self, places: Sequence[int], found: Sequence[Any], known: Known) -> None:
        left = self._parts.left[self._outputs :]
        leave([left[place] for place in places], found, known)


def by_phase(given: Sequence[PieceInput], piece: RankProgram) -> tuple[list[PieceInput], list[PieceInput]]:
    """What the forward is given, and the tangents that the backward is."""
    pairs = list(zip(given, piece.inputs, strict=True))
    early = [one for one, spec in pairs if spec.kind != "tangent"]
    return early, [one for one, spec in pairs if spec.kind == "tangent"]
