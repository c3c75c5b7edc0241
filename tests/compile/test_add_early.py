"""Results added in place, as soon as they are made, to what was there: sums of hand arithmetic."""

from __future__ import annotations

import torch
from torch import fx

from passes.compile.compile_graph import add_early

MUL, NEG = torch.ops.aten.mul.Tensor, torch.ops.aten.neg.default


def program() -> fx.GraphModule:
    """(x, y) -> (x * y, -x, None, y, x * y)."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product, negative = graph.call_function(MUL, (x, y)), graph.call_function(NEG, (x,))
    for node in (x, y, product, negative):
        node.meta["val"] = torch.empty(2, device="meta")
    graph.output((product, negative, None, y, product))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_added_to_what_is_there() -> None:
    given = program()
    before = given.code
    adding = add_early(given, (0, 3))
    x, y = torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])
    products, ys = torch.tensor([100.0, 100.0]), torch.tensor([1000.0, 1000.0])
    found = adding(x, y, products, ys)
    # In the place of what was given; the same result that is returned twice is added where it was asked for.
    assert found[0] is products and products.tolist() == [110.0, 121.0]
    assert found[3] is ys and ys.tolist() == [1005.0, 1007.0]
    assert found[1].tolist() == [-2.0, -3.0] and found[2] is None
    assert found[4].tolist() == [10.0, 21.0]
    assert y.tolist() == [5.0, 7.0]
    assert given.code == before


def test_added_before_the_next_is_made() -> None:
    names = [str(n.target) for n in add_early(program(), (0, 1)).graph.nodes if n.op == "call_function"]
    assert names == [
        "aten.mul.Tensor",
        "aten.add_.Tensor",
        "aten.neg.default",
        "aten.add_.Tensor",
    ]
