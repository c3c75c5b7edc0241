"""Programs of a batch in pieces, compiled for a rank: before, of each piece, after; and in which order they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.runtime.call_program import Around, CallGradients
from autoshard.runtime.leaves import CompilesGraphs, Leaves, Like, PieceCode, PiecesOnRank, RankSides, fitted
from autoshard.runtime.observe import InPieces, Observer, PhaseRun, observed
from autoshard.runtime.step import AtOnce, Body, Tensors
from passes.compile.compile_graph import Compiled
from passes.lower.phases import Backward, BackwardHalves
from passes.lower.piecewise import IN_PLACE, Collected, given_values, leave, step_results

Known = dict[str, Tensor]
"""Values of a step by name: a rank's placeholders, and all that is made so far."""


class GradientProgram:
    """A program of gradients. Where earlier pieces left all of its sums, it adds to them as it goes: that takes the
    memory of one gradient, and not of all."""

    def __init__(self, module: fx.GraphModule, left: Sequence[Collected], compile_: CompilesGraphs) -> None:
        self._left = left
        self.run, self.takes = compile_(module)
        results: Any = module.graph.output_node().args[0]
        pairs = list(zip(left, results, strict=True))
        names = [one.name for one in left]
        self._places = [
            place
            for place, (one, result) in enumerate(pairs)
            if one.how == "sum" and result is not None and names.count(one.name) == 1
        ]
        self._others = [place for place in range(len(left)) if place not in self._places]
        self._module, self._compile = module, compile_

    @cached_property
    def _later(self) -> tuple[Compiled, Like]:
        return self._compile(self._module, self._places)

    def prepare(self) -> None:
        """Compiles what later pieces run."""
        if self._compile.joins and self._places:
            _ = self._later

    def __call__(self, inputs: list[Tensor], known: Known) -> None:
        """Adds to `known` what it leaves. inputs: emptied, maybe."""
        sums = [known.get(self._left[place].name) for place in self._places]
        if not self._compile.joins or not sums or any(value is None for value in sums):
            leave(self._left, self.run(inputs), known)  # type: ignore[arg-type]
            return
        run, takes = self._later
        inputs += fitted(sums, takes[len(inputs) :])  # type: ignore[arg-type]
        found = run(inputs)
        known.update((self._left[place].name, found[place]) for place in self._places)  # type: ignore[misc]
        leave([self._left[i] for i in self._others], [found[i] for i in self._others], known)  # type: ignore[misc]


class CompiledPiece:
    """Forward and backward of a piece. `halves` of the backward are made where they are asked for.

    What a forward keeps is given to the backward, which may run when other pieces have run in between.
    """

    def __init__(self, code: PieceCode) -> None:
        parts, self._compile = code.parts, code.compile_
        compile_ = self._compile
        phases = parts.piece.complete()
        pairs = list(zip(parts.given, parts.piece.inputs, strict=True))
        self._given = [one for one, spec in pairs if spec.kind != "tangent"]
        self._tangents = [one for one, spec in pairs if spec.kind == "tangent"]
        count = len(phases.outputs)
        self._outputs, self._gradients = parts.left[:count], parts.left[count:]
        self._forward, self._takes = compile_(phases.forward)
        self.backward_graph: Backward | None = phases.backward
        if phases.backward is not None:
            self._backward = GradientProgram(phases.backward.module, self._gradients, compile_)
        self._halves: BackwardHalves | None = None

    def forward(self, known: Known) -> list[Any]:
        """Adds to `known` what it leaves; returns what its backward takes, less the tangents."""
        given = given_values(self._given, known)
        early = fitted(given, self._takes)
        results = self._forward(list(early))
        backward = self.backward_graph
        saved = set() if backward is None else set(backward.saved)
        # Sums are made in place, and the backward of this piece may run after other pieces' forwards.
        found = [
            value.clone() if place in saved and one.how in IN_PLACE and value is not None else value
            for place, (one, value) in enumerate(zip(self._outputs, results, strict=False))
        ]
        leave(self._outputs, found, known)  # type: ignore[arg-type]
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
        leave([self._gradients[place] for place in halves.first], found[:count], known)  # type: ignore[arg-type]
        return later + found[count:]

    def backward_weight(self, known: Known, kept: list[Any]) -> None:
        """All other gradients. kept: as `backward_input` returned it; emptied."""
        if self.backward_graph is not None:
            assert self._halves is not None, "backward_weight follows backward_input"
            inputs = fitted(kept, self._weight.takes)
            kept.clear()
            self._weight(inputs, known)

    def prepare(self, first: Sequence[str] | None) -> None:
        """Compiles all that it may run. first: as of `backward_input`; None: the backward is not run in halves."""
        if self.backward_graph is None:
            return
        self._backward.prepare()
        if first is not None:
            self._split(first)
            self._weight.prepare()

    def _split(self, first: Sequence[str]) -> BackwardHalves:
        if self._halves is None:
            assert self.backward_graph is not None
            ends = zip(self.backward_graph.gradients, self._gradients, strict=True)
            early = {end.name for end, one in ends if one.name in first}
            self._halves = self._compile.halves(self.backward_graph, early)
            self._run_input, _ = self._compile(self._halves.input)
            second = [self._gradients[place] for place in self._halves.second]
            self._weight = GradientProgram(self._halves.weight, second, self._compile)
        return self._halves

    def _given_back(self, known: Known, kept: list[Any]) -> list[Any]:
        inputs = fitted([*kept, *given_values(self._tangents, known)], self._backward.takes)
        kept.clear()
        return inputs


class PiecesRun:
    """The programs of all pieces, compiled, for one step after another: `begin`, forward and backward of every piece in
    any order, `end`. known: all values of the step so far."""

    def __init__(self, codes: Sequence[PieceCode]) -> None:
        self.parts, self.known = [one.parts for one in codes], Known()
        first = codes[0]
        self._before, self._takes = first.compile_(first.parts.before)
        self.pieces = list(map(CompiledPiece, codes))
        self._after, self._reads = first.compile_(first.parts.after)

    def prepare(self, halves: Sequence[str] | None = None) -> None:
        """Compiles all that steps may run. halves: as of `CompiledPiece.prepare`."""
        for piece in self.pieces:
            piece.prepare(halves)

    def begin(self, known: Known) -> None:
        """known: values of the placeholders that a step is given."""
        self.known, first = known, self.parts[0]
        taken = fitted(map(known.__getitem__, first.taken), self._takes)
        known.update(zip(first.made, self._before(taken), strict=True))  # type: ignore[arg-type]

    def end(self, given: Sequence[str]) -> list[Tensor | None]:
        """The results of the step, of which nothing is kept. given: names of the placeholders."""
        known, first, self.known = self.known, self.parts[0], Known()
        read = fitted(map(known.__getitem__, first.read), self._reads)
        known.update(zip(first.ended, self._after(read), strict=True))  # type: ignore[arg-type]
        return step_results(first, known, given)


class StepInPieces(PiecesRun):
    """All programs of a step whose batch is run in pieces, compiled: a body of `AtOnce`.

    What runs before the pieces counts to the first one's forward, what runs after them to the last one's backward, for
    observers: they are told of the forward and the backward of every piece.
    """

    def __init__(self, step: InPieces, codes: Sequence[PieceCode], observers: Sequence[Observer]) -> None:
        super().__init__(codes)
        self._step, self._observers = step, observers

    def run(
        self, leaves: Tensors, values: Tensors, tangents: Mapping[int, Tensor], backward: bool
    ) -> list[Tensor | None]:
        names = self._step.tangents
        known = dict(zip(self._step.leaves, values, strict=True))
        return self.results(known | {names[index]: value for index, value in tangents.items()})

    def results(self, known: Known) -> list[Tensor | None]:
        """known: values of the placeholders that a step is given, to which all that is made is added."""
        inputs, results = tuple(known[name] for name in self._step.given), list[Tensor | None]()
        for place, piece in enumerate(self.pieces):
            last = place == len(self.pieces) - 1
            told = lambda phase, last=last: observed(
                self._observers, lambda: PhaseRun(phase, self._step, inputs, last)
            )
            with told("forward"):
                if place == 0:
                    self.begin(known)
                kept = piece.forward(known)
            with told("backward") if piece.backward_graph is not None else nullcontext():
                piece.backward(known, kept)
                if last:
                    results = self.end(self._step.given)
        return results


def call_gradients(pieces: PiecesOnRank) -> CallGradients:
    """Of a call that ranks run in pieces, each all of the model."""
    known = [(kind.index, value) for kind, _, value in pieces.tangents]
    return CallGradients(pieces.outputs, pieces.inputs, known)


def program_in_pieces(
    pieces: PiecesOnRank, ours: RankSides, device: torch.device, observers: Sequence[Observer], around: Around
) -> AtOnce:
    """The counterpart of `autoshard.runtime.step.Program` for a batch in pieces."""
    placeholders = pieces.placeholders()
    given = [(kind, name, value) for kind, name, value in placeholders if kind.kind != "tangent"]
    leaves = Leaves([kind.kind for kind, *_ in given], [value for *_, value in given], ours)
    ends = call_gradients(pieces)

    def compiled(ours: PiecesOnRank, names: Mapping[int, str]) -> Body:
        step = InPieces(lambda: ours.programs, tuple(name for _, name, _ in given), names)
        return StepInPieces(step, ours.codes, observers).run

    early = body = compiled(pieces, {kind.index: name for kind, name, _ in pieces.tangents})
    if not ends.has_loss:
        early = compiled(pieces.without_gradients(), {})
    return AtOnce(leaves, ends, body, early, device, around)
