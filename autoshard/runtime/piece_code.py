"""A rank's programs of the pieces of a batch, and what compiles their graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor, fx

from autoshard.runtime.leaves import expected
from passes.compile.compile_graph import Compiled, compile_graph
from passes.ir.joint import GraphInput
from passes.lower.phases import Backward, BackwardHalves, split_backward
from passes.lower.piecewise import RankPieces, pieces_of, without_gradients
from passes.lower.rank_program import RankProgram

Like = Sequence[Tensor]


class CompilesGraphs(Protocol):
    @property
    def joins(self) -> bool:
        """Whether programs are to be joined before."""
        ...

    def __call__(self, module: fx.GraphModule, adding: Sequence[int] = ()) -> tuple[Compiled, Like]:
        """The compiled graph, and how its inputs look. adding: as for `compile_graph`."""
        ...

    def halves(self, backward: Backward, first: Collection[str]) -> BackwardHalves:
        """As `split_backward`, once."""
        ...


class Compiler:
    """Equal graphs are compiled once: pieces mostly are."""

    def __init__(self, backend: str) -> None:
        self.joins = backend == "eager"  # a compiler joins more itself
        self._backend = backend
        self._known: dict[str, tuple[Compiled, tuple[Tensor, ...]]] = {}

    def __call__(self, module: fx.GraphModule, adding: Sequence[int] = ()) -> tuple[Compiled, Like]:
        text = "\n".join(node.format_node() or "" for node in module.graph.nodes)
        values = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        results: Any = module.graph.output_node().args[0]
        values += [results[place].meta["val"] for place in adding]
        key = f"{text} {adding} {[(v.shape, v.stride(), v.dtype) for v in values]}"
        if key not in self._known:
            self._known[key] = compile_graph(module, self._backend, adding), expected(values)
        return self._known[key]

    def halves(self, backward: Backward, first: Collection[str]) -> BackwardHalves:
        return split_backward(backward, first)


@dataclass(frozen=True)
class PieceCode:
    """A rank's program of one piece, and what compiles its graphs."""

    parts: RankPieces
    compile_: CompilesGraphs


class PiecesOnRank:
    """A rank's programs of all pieces of a batch, in their order, of the whole model or of a stage. pieces: of the
    joint graph that they are of."""

    def __init__(self, programs: Sequence[RankProgram], pieces: int, compile_: CompilesGraphs) -> None:
        self.programs, self._pieces, self._compile = tuple(programs), pieces, compile_
        self.inputs, self.outputs = programs[0].inputs, programs[0].outputs

    @property
    def count(self) -> int:
        return len(self.programs)

    @cached_property
    def codes(self) -> list[PieceCode]:
        parts = [pieces_of(program, self._pieces) for program in self.programs]
        return [PieceCode(one.joined() if self._compile.joins else one, self._compile) for one in parts]

    def placeholders(self, piece: int = 0) -> list[tuple[GraphInput, str, Tensor]]:
        """Inputs of a piece's program: what each means, its name, and how it looks."""
        nodes = self.programs[piece].local.module.graph.find_nodes(op="placeholder")
        return [(spec, n.name, n.meta["val"]) for spec, n in zip(self.inputs, nodes, strict=True)]

    @property
    def tangents(self) -> list[tuple[GraphInput, str, Tensor]]:
        """Those of the inputs that are read."""
        return [one for one in self.placeholders() if one[0].kind == "tangent" and one[1] in self.reads]

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the inputs that are read."""
        nodes = self.programs[0].local.module.graph.find_nodes(op="placeholder")
        return frozenset(node.name for node in nodes if node.users)

    def without_gradients(self) -> PiecesOnRank:
        return PiecesOnRank(list(map(without_gradients, self.programs)), self._pieces, self._compile)
