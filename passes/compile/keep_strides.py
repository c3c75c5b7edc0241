"""Results of a compiled graph lie in memory as the graph says: whatever reads them next was compiled for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir.op_traits import is_view
from passes.ir.torch_compat import fake_mode_of, no_fake_mode

__all__ = ["keep_strides", "result_values"]

aten = torch.ops.aten


def result_values(module: fx.GraphModule) -> list[Tensor | None]:
    """What each result of `module` looks like; None: it is no tensor."""
    results = module.graph.output_node().args[0]
    return [node.meta["val"] if isinstance(node, fx.Node) else None for node in results]  # type: ignore[union-attr]


def keep_strides(module: fx.GraphModule, wanted: Sequence[Tensor | None]) -> None:
    """Copy results of `module`, in place, that do not lie as those of `wanted` do.

    Inductor pads matrices for tensor cores and cuts the product: a view with longer rows, which it would return as it
    is, since of a view it keeps the order of the strides only. [torch/_inductor/fx_passes/pad_mm.py, 2.11 to 2.13]

    %cut: bf16[16, 4] = slice(%padded, 1, 0, 4)  # strides 8, 1; wanted 4, 1
    return (%cut,)
    ->
    %copy = clone(%cut, memory_format=contiguous_format)
    return (%copy,)
    """
    output = module.graph.output_node()
    given = output.args[0]
    with module.graph.inserting_before(output):
        results = [
            _lying_as(module.graph, node, like) if isinstance(node, fx.Node) and like is not None else node
            for node, like in zip(given, wanted, strict=True)  # type: ignore[arg-type]
        ]
    output.args = (tuple(results) if isinstance(given, tuple) else results,)
    module.recompile()


def _lying_as(graph: fx.Graph, node: fx.Node, like: Tensor) -> fx.Node:
    value = _value_now(node)
    order = sorted(range(like.ndim), key=lambda dim: (-like.stride(dim), dim))
    if not isinstance(value, Tensor) or _strides(value) == _strides(like):
        return node
    if not _is_dense(like, order):  # such as a broadcast result: nothing that is written out lies so
        return node
    back = [order.index(dim) for dim in range(like.ndim)]
    turned = order != sorted(order)
    node = _called(graph, aten.permute.default, node, order) if turned else node
    node = _called(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return _called(graph, aten.permute.default, node, back) if turned else node


def _value_now(node: fx.Node) -> Any:
    """What `node` looks like. Of a view it is computed again: where the product under it was padded, meta "val" still
    says how the view lay before."""
    before = node.meta.get("val")
    viewed = _value_now(node.args[0]) if is_view(node) and isinstance(node.args[0], fx.Node) else None
    if not isinstance(viewed, Tensor):
        return before
    try:
        return _run(node.target, viewed, *node.args[1:], **node.kwargs)
    except RuntimeError:  # no view of what lies so: Inductor copies it
        return before


def _is_dense(x: Tensor, order: Sequence[int]) -> bool:
    """Whether it is contiguous with its dims in `order`. No op is asked: it is a fake of another mode."""
    expected = 1
    for dim in reversed(order):
        if x.shape[dim] > 1 and x.stride(dim) != expected:
            return False
        expected *= x.shape[dim]
    return True


def _strides(x: Tensor) -> list[int]:
    """Of a dim of size 1 it says nothing."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _called(graph: fx.Graph, op: Any, node: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    made = graph.call_function(op, (node, *args), kwargs)
    made.meta["val"] = _run(op, node.meta["val"], *args, **kwargs)
    return made


def _run(op: Any, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Under the mode of `value`: while Inductor compiles, another one is at work."""
    with no_fake_mode(), fake_mode_of(value):
        return op(value, *args, **kwargs)
