"""The graph of a piece in symbols is, for every piece of every batch that it is for, what cutting that gives."""

from __future__ import annotations

import pytest

from autoshard.planning import canonical_capture
from passes.ir.size_names import SizeNames
from passes.ir.sized_graph import Looks, Numbers, SizedJoint, SizedModule, same_nodes
from passes.ir.torch_sizes import SizesLost, SizeSymbols, evaluation, symbolic_sizes
from passes.micro_batches.cut_batch import SizedCut, cut_batch, piece_in_symbols, plain_graph, when_cut
from tests.runtime.test_sized_calls import batch, made

HINT = (10, 6)


@pytest.mark.parametrize("count", [2, 4])
def test_one_graph_is_that_of_all_pieces(count: int) -> None:
    """Of batches in even and uneven pieces; one whose last pieces have a single row needs another graph for these."""
    names = SizeNames.of([(8, 6)], [(4, 9)])
    symbolic = names.symbolic((4, 9))
    captured = canonical_capture(made("Attending"), (batch((4, 9)),), {}, sizes=symbolic)
    joint = SizedJoint(symbolic.symbols, names.count, captured.joint)

    own = joint.at(HINT)
    assert own is not None
    _, times = when_cut(own, count)
    with symbolic_sizes():
        symbols = SizeSymbols(HINT)
        cut = SizedCut.of(joint.at(HINT, symbols) or own, times, symbols)
        piece = (cut.pieces(HINT) or [])[-1]
        symbols = SizeSymbols(piece.values)
        graph = cut.graph(joint.at(HINT, symbols) or own, count - 1, piece, symbols)
        with pytest.raises(SizesLost, match="no number of samples"):  # of the first piece there are others
            plain = plain_graph(joint.at(HINT, symbols) or own)
            piece_in_symbols(plain, times, 0, piece.own(symbols))
    numbers = Numbers(symbols)
    module = SizedModule(graph.module, numbers)
    evaluate = evaluation(len(piece.values), numbers.holds(), numbers.codes())
    served = 0
    for size in [HINT, (12, 5), (7, 4), (9, 11), (5, 3)]:
        concrete = joint.at(size)
        assert concrete is not None
        pieces = cut_batch(concrete, count)
        for one, there in zip(cut.pieces(size) or [], (pieces, *pieces.others), strict=True):
            found = evaluate(one.values) if len(one.values) == len(piece.values) else None
            if found is None:
                assert one.length == 1, one
                continue
            served += 1
            assert same_nodes(module.at(found, Looks(module.looks, found)).graph, there.graph), one
    assert served >= 4 * count and cut.pieces((count - 1, 6)) is None
