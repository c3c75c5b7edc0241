"""What ops are, stated by hand: above all those about which the passes once disagreed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

import passes.ops  # noqa: F401
from passes.ir.op_traits import (
    fuses,
    is_cheap,
    is_product,
    is_reduction,
    is_view,
    is_whole_view,
    op_kind,
    reads_shape_only,
    rounds,
    storage_root,
)
from passes.ir.op_work import global_flops
from passes.rules.core.rule_table import TABLE
from passes.strategies.traffic import fused_traffic, reads_values

aten = torch.ops.aten
autoshard = torch.ops.autoshard


torch.library.define("traits_test::mix", "(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
torch.library.impl("traits_test::mix", "CompositeExplicitAutograd", lambda x: x * 2)


def traced(op: Any, *args: Any) -> fx.Node:
    """`op` in a graph, on placeholders in place of the tensors among `args`."""
    graph = fx.Graph()

    def placed(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [placed(item) for item in argument]
        if not isinstance(argument, torch.Tensor):
            return argument
        node = graph.placeholder("x")
        node.meta["val"] = argument
        return node

    node = graph.call_function(op, tuple(map(placed, args)))
    node.meta["val"] = op(*args)
    return node


X = torch.ones(4, 8)
INDEX = torch.zeros(4, 8, dtype=torch.int64)

# Of each: the op, the kind that it is, and what the passes took it to be before.
DISPUTED: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten.index.Tensor, (X, [INDEX[0]]), "indexing"),  # fused when saved, a kernel of its own in prices
    (aten._unsafe_index.Tensor, (X, [INDEX[0]]), "indexing"),  # neither, though it is `index`
    (aten.index_select.default, (X, 0, INDEX[0]), "indexing"),  # neither, though it is `index`
    (aten.cat.default, ([X, X],), "indexing"),  # a creation
    (aten.gather.default, (X, 1, INDEX), "indexing"),  # a creation
    (aten.flip.default, (X, [0]), "indexing"),  # a creation
    (aten.roll.default, (X, [1]), "indexing"),  # a creation
    (aten.constant_pad_nd.default, (X, [1, 1]), "indexing"),  # a creation
    (aten.tril.default, (X,), "indexing"),  # a creation
    (aten.repeat.default, (X, [2, 1]), "indexing"),  # fused when saved, not in prices
    (aten._to_copy.default, (X,), "pointwise"),  # fused when saved, not in prices
    (aten.lift_fresh_copy.default, (X,), "pointwise"),  # fused when saved, not in prices
    (aten.clone.default, (X,), "pointwise"),
    (aten.masked_fill.Tensor, (X, X > 0, torch.tensor(1.0)), "pointwise"),  # as its overload with a number
    (aten.hardswish.default, (X,), "pointwise"),  # pointwise among the rules only
    (aten.floor_divide.default, (X, X), "pointwise"),  # pointwise among the rules only
    (aten.new_zeros.default, (X, [4]), "creation"),  # fused when saved, not in prices
    (aten.new_full.default, (X, [4], 1.0), "creation"),  # fused when saved, not in prices
    (aten.empty.memory_format, ([4],), "creation"),  # fused when saved, not in prices
    (aten.full_like.default, (X, 0.0), "creation"),
    (aten.split.Tensor, (X, 2), "view"),  # part of storage when saved, not in prices
    (aten.unbind.int, (X,), "view"),  # neither
    (aten.unfold.default, (X, 1, 2, 1), "view"),  # in prices only: an output of it was no alias of its input
    (aten._unsafe_view.default, (X, [32]), "view"),  # in prices; when saved, a copy
    (aten.as_strided.default, (X, [2], [1]), "view"),  # when saved; in prices a kernel
    (aten.view_as_complex.default, (X.view(4, 4, 2),), "view"),  # a kernel everywhere
    (aten.view_as_real.default, (torch.ones(4, dtype=torch.complex64),), "view"),  # a kernel everywhere
    (aten.mean.dim, (X, [1]), "reduction"),  # when saved; in prices its operand was stored
    (aten.max.dim, (X, 1), "reduction"),  # neither
    (aten.prod.default, (X,), "reduction"),  # neither
    (aten.argmin.default, (X,), "reduction"),  # neither, though `argmax` was
    (aten.baddbmm.default, (torch.ones(2, 4, 4),) * 3, "product"),  # to hide behind, yet of no operations
    (aten.mv.default, (X, X[0]), "product"),  # nowhere
    (aten.dot.default, (X[0], X[0]), "product"),  # nowhere
    (
        torch.ops.traits_test.mix.default,
        (X,),
        "product",
    ),  # a product and fused at once: no compiler sees into an op of the user's
    (aten.embedding.default, (X, INDEX[0]), "opaque"),  # saved, as torch's partitioner does
    (aten.cumsum.default, (X, 0), "opaque"),
    (aten.sort.default, (X,), "opaque"),
    (aten.scatter_add.default, (X, 1, INDEX, X), "opaque"),
]


@pytest.mark.parametrize(("op", "args", "kind"), DISPUTED, ids=lambda value: str(value)[:40])
def test_kind(op: Any, args: tuple[Any, ...], kind: str) -> None:
    node = traced(op, *args)
    assert op_kind(node) == kind
    assert fuses(node) == (kind in ("pointwise", "creation", "indexing"))
    assert is_view(node) == (kind == "view")
    assert is_product(node) == (kind == "product")
    assert is_reduction(node) == (kind == "reduction")


def test_ends_of_a_graph_have_no_kind() -> None:
    node = traced(aten.neg.default, X)
    assert op_kind(node.all_input_nodes[0]) is None
    assert op_kind(node.graph.output(node)) is None


def test_cheap_is_what_fuses_views_and_little_reductions() -> None:
    assert is_cheap(traced(aten.gather.default, X, 1, INDEX))
    assert is_cheap(traced(aten.unbind.int, X))
    assert is_cheap(traced(aten.max.dim, torch.ones(4, 8), 1))  # 32 read, 4 + 4 written: a ratio of 4
    assert not is_cheap(traced(aten.amax.default, torch.ones(4, 8), [1]))  # 32 read, 4 written
    assert not is_cheap(traced(aten.mm.default, X, X.t()))
    assert not is_cheap(traced(aten.embedding.default, X, INDEX[0]))


def test_whole_views_alias_all_of_their_operand() -> None:
    assert is_whole_view(traced(aten._unsafe_view.default, X, [32]))
    assert is_whole_view(traced(aten.expand.default, X[:1], [4, 8]))
    assert is_whole_view(traced(aten.slice.Tensor, X, 0, 0, 4))
    assert not is_whole_view(traced(aten.slice.Tensor, X, 0, 0, 3))
    assert not is_whole_view(traced(aten.split.Tensor, X, 2))
    assert not is_whole_view(traced(aten.clone.default, X))


def test_storage_is_found_through_views_of_parts() -> None:
    node = traced(aten.unbind.int, X)
    part = node.graph.call_function(torch.ops.aten.unsqueeze.default, (node, 0))
    assert storage_root(part) is node.all_input_nodes[0]


def test_creations_by_likeness_read_no_element() -> None:
    like, new, plain = (
        traced(aten.zeros_like.default, X),
        traced(aten.new_zeros.default, X, [4]),
        traced(aten.neg.default, X),
    )
    assert [reads_shape_only(n) for n in (like, new, plain)] == [True, True, False]
    assert [reads_values(n) for n in (like, new, plain)] == [(False,), (False,), (True,)]


def test_an_indexed_value_is_not_stored_for_a_pointwise_reader() -> None:
    """negative(x[i]): one kernel, which reads x and i and stores the result."""
    node = traced(aten.index.Tensor, X, [INDEX[0]])
    node.meta["phase"] = "forward"
    negative = node.graph.call_function(aten.neg.default, (node,))
    negative.meta.update(val=X, phase="forward")
    node.graph.output(negative)
    assert (fused_traffic(node).reads, fused_traffic(node).writes) == ((True, True), False)
    assert (fused_traffic(negative).reads, fused_traffic(negative).writes) == ((False,), True)


def test_a_cast_is_stored_for_a_product_only() -> None:
    node = traced(aten._to_copy.default, X)
    node.meta["phase"] = "forward"
    mean = node.graph.call_function(aten.mean.dim, (node, [0]))
    mean.meta.update(val=X[0], phase="forward")
    assert not fused_traffic(node).writes
    product = node.graph.call_function(aten.mv.default, (node, mean))
    product.meta.update(val=X[:, 0], phase="forward")
    assert fused_traffic(node).writes


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mm.default, (torch.ones(3, 5), torch.ones(5, 7))),
        (aten.bmm.default, (torch.ones(2, 3, 5), torch.ones(2, 5, 7))),
        (aten.addmm.default, (torch.ones(7), torch.ones(3, 5), torch.ones(5, 7))),
        (aten.baddbmm.default, (torch.ones(2, 3, 7), torch.ones(2, 3, 5), torch.ones(2, 5, 7))),
        (
            aten.convolution.default,
            (torch.ones(2, 4, 9), torch.ones(6, 2, 3), None, [1], [1], [1], False, [0], 2),
        ),
        (
            aten.convolution.default,
            (torch.ones(2, 4, 9), torch.ones(4, 3, 3), None, [2], [1], [1], True, [0], 1),
        ),
    ],
)
def test_operations_are_those_that_torch_counts(op: Any, args: tuple[Any, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        op(*args)
    assert global_flops(traced(op, *args)) == counter.get_total_flops() > 0


def test_operations_of_products_that_torch_does_not_count() -> None:
    assert global_flops(traced(aten.mv.default, torch.ones(3, 5), torch.ones(5))) == 2 * 3 * 5
    assert global_flops(traced(aten.dot.default, torch.ones(5), torch.ones(5))) == 2 * 5


def test_all_products_round() -> None:
    """`grouped_mm` and the gradient of neighbourhood attention once counted as exact."""
    graph = fx.Graph()
    for op in (
        autoshard.contract,
        autoshard.grouped_mm,
        autoshard.attention,
        autoshard.attention_backward,
        autoshard.neighborhood_attention,
        autoshard.neighborhood_attention_backward,
        aten.convolution,
        aten.mm,
    ):
        node = graph.call_function(op.default, ())
        assert is_product(node) and rounds(node)
    assert rounds(graph.call_function(aten.exp.default, ()))
    assert not rounds(graph.call_function(aten.relu.default, ()))
    assert not rounds(graph.call_function(aten.cat.default, ()))


def _kinds(*makers: str) -> dict[str, str | None]:
    """Name -> kind of the ops of the table whose rule one of these functions makes."""
    graph = fx.Graph()
    found = {}
    for name, build in TABLE.items():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        if build.__qualname__.split(".")[0] in makers:
            found[rest] = op_kind(graph.call_function(target, ()))
    return found


def test_rules_and_traits_agree_on_what_is_pointwise() -> None:
    """Complex numbers are made by kernels of their own, and membership is searched for."""
    kinds = _kinds("pointwise")
    assert len(kinds) > 30
    others = {name: kind for name, kind in kinds.items() if kind != "pointwise"}
    assert others == {
        "use.default": "view",
        "either.default": "view",
        "polar.default": "opaque",
        "complex.default": "opaque",
        "isin.Tensor_Scalar": "opaque",
    }


def test_rules_and_traits_agree_on_what_is_made_of_nothing() -> None:
    assert set(_kinds("full", "arange", "iota", "uniform").values()) == {"creation"}
