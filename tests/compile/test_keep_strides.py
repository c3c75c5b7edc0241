"""Results of compiled graphs lie as their graphs say, also where the compiler would have them otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.compile.compile_graph import keep_strides, result_values


def traced(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake")(x)
    assert isinstance(module, fx.GraphModule)
    return module


@pytest.mark.parametrize(
    ("cut", "whole"),
    [
        (lambda x: x[:, :4], lambda x: x[:, :4].clone(memory_format=torch.contiguous_format)),
        (lambda x: x.t()[:4], lambda x: x[:, :4].clone(memory_format=torch.contiguous_format).t()),
    ],
    ids=["rows", "columns"],
)
def test_a_cut_result_is_copied(cut: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(16, 8)
    given, wanted = traced(lambda x: (x + 1, cut(x)), x), traced(lambda x: (x + 1, whole(x)), x)
    keep_strides(given, result_values(wanted))
    given.graph.lint()
    values = result_values(given)
    for result, value, expected in zip(given(x), values, (x + 1, whole(x)), strict=True):
        assert value is not None and result.equal(expected)
        assert result.stride() == value.stride() == expected.stride()


def test_a_view_of_what_was_cut_is_copied() -> None:
    """Its meta "val" says how it lay before what it views was padded."""
    x = torch.randn(16, 8)
    given = traced(lambda x: (x[:, :4].clone(memory_format=torch.contiguous_format).view(4, 4, 4),), x)
    wanted = result_values(given)
    (copy,) = (node for node in given.graph.nodes if node.target is torch.ops.aten.clone.default)
    copy.replace_all_uses_with(copy.args[0])
    given.graph.erase_node(copy)
    keep_strides(given, wanted)
    (result,) = given(x)
    assert result.equal(x[:, :4].reshape(4, 4, 4)) and result.stride() == (16, 4, 1)


def test_what_lies_as_wanted_is_left() -> None:
    """Also a result that is broadcast, one of which a dim of size 1 has another stride, and one that is none."""
    function = lambda x: (x + 1, x[:1].expand(5, 8), x[:, :1] + 1, x.sum())
    module, wanted = (traced(function, torch.randn(16, 8)) for _ in range(2))
    before = [node.name for node in module.graph.nodes]
    values = result_values(wanted)
    assert values[1] is not None and values[2] is not None
    values[1:3] = [torch.empty(5, 8), torch.empty_strided((16, 1), (1, 16))]
    values[1] = values[1].as_strided((5, 8), (0, 2))
    keep_strides(module, [*values[:3], None])
    assert [node.name for node in module.graph.nodes] == before
