"""A stage of a pipeline on this rank: its programs for the pieces of one step after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from autoshard.runtime.compiled_pieces import CompiledEnds, CompiledPiece
from autoshard.runtime.piece_compiler import Compiler, Known
from passes.ir.joint import GraphInput
from passes.lower.one_piece import pieces_of
from passes.lower.piece_values import step_results
from passes.lower.piecewise import without_gradients
from passes.lower.rank_program import RankProgram
from passes.stages.stage_ends import Leaf, StageEnds
from passes.stages.stage_graph import Crossing, StageGraph

__all__ = ["StageOnRank", "StageRun"]


@dataclass(frozen=True)
class StageOnRank:
    """A stage's graph, and this rank's program for each piece of a batch."""

    graph: StageGraph
    programs: tuple[RankProgram, ...]

    def without_gradients(self) -> StageOnRank:
        return replace(self, programs=tuple(map(without_gradients, self.programs)))

    @property
    def placeholders(self) -> list[tuple[GraphInput, fx.Node]]:
        """Of the first piece."""
        return list(zip(self.programs[0].inputs, _placeholders(self.programs[0]), strict=True))

    def tangents(self) -> list[tuple[int, Tensor]]:
        """Of the call's outputs that the stage returns: index, and a tensor like the gradient here."""
        values = {spec.index: node.meta["val"] for spec, node in self.placeholders if spec.kind == "tangent"}
        return [(whole, values[i]) for i, whole in enumerate(self.graph.outputs) if i in values]

    def received(self) -> list[list[Crossing]]:
        """Per piece what comes from the stage before, in this rank's shapes."""
        first = len(self.graph.inputs)
        return [self._crossings(p, "input", first, self.graph.received) for p in self.programs]

    def sent(self) -> list[list[Crossing]]:
        """Per piece what goes to the stage after, in this rank's shapes. Without a gradient the shape is not needed."""
        first = len(self.graph.outputs)
        return [self._crossings(p, "tangent", first, self.graph.sent) for p in self.programs]

    def _crossings(
        self, program: RankProgram, kind: str, first: int, known: Sequence[Crossing]
    ) -> list[Crossing]:
        pairs = zip(program.inputs, _placeholders(program), strict=True)
        shapes = {spec.index: tuple(node.meta["val"].shape) for spec, node in pairs if spec.kind == kind}
        return [
            replace(crossing, shape=shapes.get(index, crossing.shape))
            for index, crossing in enumerate(known, first)
        ]


class StageRun:
    """What `StagePrograms` asks for. A step: `start`, forward and backward of all pieces in any order, `finish`."""

    def __init__(self, stage: StageOnRank, compile_: Compiler) -> None:
        parts = [pieces_of(program, stage.graph.joint.pieces) for program in stage.programs]
        if compile_.joins:
            parts = [one.joined() for one in parts]
        self._at = StageEnds.of(stage.graph)
        self._parts = parts
        self._placeholders = [node.name for _, node in stage.placeholders]
        self._ends = CompiledEnds(parts[0], compile_)
        self._pieces = [CompiledPiece(one, compile_) for one in parts]
        self._known: Known = {}
        self._kept: dict[int, list[Any]] = {}

    def start(self, leaves: Mapping[Leaf, Tensor], tangents: Mapping[int, Tensor]) -> None:
        """leaves: this rank's part of what the stage reads. tangents: of outputs of the call, by index."""
        self._known = {name: leaves[leaf] for leaf, name in self._at.leaves.items()}
        given = self._at.tangents.items()
        self._known.update({name: tangents[index] for index, name in given if index in tangents})
        self._ends.before(self._known)

    def forward(self, piece: int, received: Sequence[Tensor]) -> list[Tensor]:
        self._known.update(zip(self._at.received, received, strict=True))
        self._kept[piece] = self._pieces[piece].forward(self._known)
        return self._taken(piece, self._at.sent)

    def backward(self, piece: int, returned: Sequence[Tensor]) -> list[Tensor]:
        self._known.update(zip(self._at.returned, returned, strict=True))
        self._pieces[piece].backward(self._known, self._kept.pop(piece))
        return self._taken(piece, self._at.given_back)

    def backward_input(self, piece: int, returned: Sequence[Tensor]) -> list[Tensor]:
        self._known.update(zip(self._at.returned, returned, strict=True))
        results = self._parts[piece].results
        first = [name for place in self._at.given_back if (name := results[place]) is not None]
        kept = self._kept.pop(piece)
        self._kept[piece] = self._pieces[piece].backward_input(self._known, kept, first)
        return self._taken(piece, self._at.given_back)

    def backward_weight(self, piece: int) -> None:
        self._pieces[piece].backward_weight(self._known, self._kept.pop(piece))

    def finish(self) -> dict[Leaf, Tensor]:
        """Outputs of the call, new values of buffers and gradients, by kind and the name that the whole graph has for
        them. Nothing of the step is kept."""
        self._ends.after(self._known)
        found = step_results(self._parts[0], self._known, self._placeholders)
        self._known, self._kept = {}, {}
        named = ((leaf, found[place]) for place, leaf in self._at.results.items())
        return {leaf: value for leaf, value in named if value is not None}

    def _taken(self, piece: int, places: Sequence[int]) -> list[Tensor]:
        names = [self._parts[piece].results[place] for place in places]
        return [self._known[name] for name in names if name is not None]


def _placeholders(program: RankProgram) -> list[fx.Node]:
    return [node for node in program.local.module.graph.nodes if node.op == "placeholder"]
