"""Graphs that run op by op: fewer ops, the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.compile.fuse_eager import FuseEager

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def fused(function: Callable[..., object], *values: Tensor) -> tuple[fx.GraphModule, Counter[str]]:
    """The fused graph, checked to compute the same, and its ops counted."""
    module = make_fx(function)(*values)
    wanted = module(*values)
    FuseEager()(module)
    torch.testing.assert_close(module(*values), wanted)
    names = (str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return module, Counter(names)


def test_a_bias_joins_its_product() -> None:
    def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.add.Tensor(aten.view.default(aten.mm.default(x, w), [2, 3, 5]), b)

    _, ops = fused(linear, torch.randn(6, 4), torch.randn(4, 5), torch.randn(5))
    assert ops == {"aten.addmm.default": 1, "aten.view.default": 1}


def test_a_bias_on_the_left_joins_too() -> None:
    _, ops = fused(
        lambda x, w, b: aten.add.Tensor(b, x @ w), *(torch.randn(3, 3) for _ in range(2)), torch.randn(3)
    )
    assert ops == {"aten.addmm.default": 1}


def test_what_is_no_bias_stays() -> None:
    """A residual, a scaled sum, a product with a second reader, and a bias along the rows."""
    x, w = torch.randn(3, 3), torch.randn(3, 3)
    assert fused(lambda x, w: aten.add.Tensor(x @ w, x), x, w)[1]["aten.addmm.default"] == 0
    assert fused(lambda x, w: aten.add.Tensor(x @ w, x[0], alpha=2), x, w)[1]["aten.addmm.default"] == 0
    assert fused(lambda x, w: ((y := x @ w) + x[0]) * y, x, w)[1]["aten.addmm.default"] == 0
    rows = lambda x, w: aten.add.Tensor(aten.view.default(x @ w, [9]), aten.view.default(w, [9]))
    assert fused(rows, x, w)[1]["aten.addmm.default"] == 0


def test_views_that_change_nothing_go() -> None:
    def same(x: Tensor) -> Tensor:
        return aten.permute.default(aten.view.default(x * 2, [3, 4]), [0, 1]) + 1

    assert fused(same, torch.randn(3, 4))[1] == {"aten.mul.Tensor": 1, "aten.add.Tensor": 1}
    swapped = lambda x: aten.permute.default(x * 2, [1, 0])
    assert fused(swapped, torch.randn(3, 3))[1]["aten.permute.default"] == 1


def test_only_a_buffer_with_one_reader_is_reduced_in_place() -> None:
    graph = fx.Graph()
    g = graph.placeholder("g")
    alone, shared = (graph.call_function(aten.cat.default, ([g, g],)) for _ in range(2))
    for node in (g, alone, shared):
        node.meta["val"] = torch.empty(4 if node is g else 8)
    first = graph.call_function(c10d.all_reduce.default, (alone, "sum", "axes:a"))
    second = graph.call_function(c10d.all_reduce.default, (shared, "sum", "axes:a"))
    third = graph.call_function(c10d.all_reduce.default, (g, "sum", "axes:a"))
    graph.output((first, second, third, shared))
    FuseEager()(fx.GraphModule({}, graph))
    assert first.target is c10d.all_reduce_.default
    assert second.target is c10d.all_reduce.default
    assert third.target is c10d.all_reduce.default


def reduced(*ops: tuple[object, ...]) -> fx.Node:
    """The all-reduce of what a chain of ops makes of two inputs of [4, 4], after the pass. ops: (target, more args)."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = torch.empty(4, 4)
    node = x
    for target, *more in ops:
        arguments = [y if word == "y" else word for word in more]
        node = graph.call_function(target, (node, *arguments))  # type: ignore[arg-type]
        node.meta["val"] = target(*torch.fx.node.map_arg(node.args, lambda n: n.meta["val"]))  # type: ignore[operator]
    start = graph.call_function(c10d.all_reduce.default, (node, "sum", "axes:a"))
    graph.output((start,))
    FuseEager()(fx.GraphModule({}, graph))
    return start


def test_what_owns_its_memory_is_reduced_in_place() -> None:
    product = (aten.mm.default, "y")
    for chain in ([product], [product, (aten.view.default, [16])], [(aten.sum.dim_IntList, [0])]):
        assert reduced(*chain).target is c10d.all_reduce_.default
    turned = (aten.permute.default, [1, 0])
    for chain in ([], [turned], [product, turned], [(aten.view.default, [16])]):
        assert reduced(*chain).target is c10d.all_reduce.default


def padding(sides: list[int], *fill: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: aten.constant_pad_nd.default(torch.cat([x, y], -2), sides, *fill)


def test_padding_joins_the_copy_it_pads() -> None:
    """Before, after and on both sides of the joined dim; zeros or not."""
    x, y = torch.randn(2, 3, 4), torch.randn(2, 1, 4)
    for sides, *fill in (([0, 0, 1, 0],), ([0, 0, 0, 2], -1.0), ([0, 0, 3, 1], 0.5)):
        _, ops = fused(padding(sides, *fill), x, y)
        assert ops == {"aten.cat.default": 1, "aten.new_full.default": sum(n > 0 for n in sides)}


def test_other_padding_stays() -> None:
    """Of another dim, a cut, and of what is read otherwise too."""
    x, y = torch.randn(2, 3), torch.randn(1, 3)
    for sides in ([1, 0], [1, 0, 1, 0], [0, 0, -1, 2]):
        assert fused(padding(sides), x, y)[1]["aten.constant_pad_nd.default"] == 1
    twice = lambda x, y: (z := torch.cat([x, y]), aten.constant_pad_nd.default(z, [0, 0, 1, 0]))
    assert fused(twice, x, y)[1]["aten.constant_pad_nd.default"] == 1
