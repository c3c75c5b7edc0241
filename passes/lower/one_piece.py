"""A rank's program that is not in pieces, as one with a single piece: stages of a pipeline run either alike."""

from __future__ import annotations

from torch import fx

from passes.ir.torch_compat import lazy_module
from passes.lower.piecewise import Collected, PieceInput, RankPieces, split_pieces
from passes.lower.rank_program import RankProgram


def pieces_of(program: RankProgram, pieces: int) -> RankPieces:
    """pieces: of the joint graph that `program` is of."""
    return one_piece(program) if pieces == 1 else split_pieces(program)


def one_piece(program: RankProgram) -> RankPieces:
    """All of `program` is the piece; nothing runs before it or after it."""
    placeholders = [node for node in program.local.module.graph.nodes if node.op == "placeholder"]
    ends = list(zip(program.outputs, _results(program), strict=True))
    names = [None if node is None else f"result {place}" for place, (_, node) in enumerate(ends)]
    values = [place for place, (end, _) in enumerate(ends) if end.kind != "grad"]
    gradients = [place for place, (end, _) in enumerate(ends) if end.kind == "grad"]
    return RankPieces(
        before=_nothing(),
        taken=(),
        made=(),
        piece=program,
        given=tuple(PieceInput(node.name) for node in placeholders),
        left=tuple(Collected(f"result {place}", "own") for place in (*values, *gradients)),
        after=_nothing(),
        read=(),
        ended=(),
        results=tuple(names),
    )


def _results(program: RankProgram) -> list[fx.Node | None]:
    return list(program.local.module.graph.output_node().args[0])  # type: ignore[arg-type]


def _nothing() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(())
    return lazy_module(graph)
