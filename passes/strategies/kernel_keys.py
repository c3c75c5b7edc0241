"""What an op is timed as: equal for ops that take equally long, in the global graph and in a rank's; and what of an op
decides its strategies and their prices: layers that are alike share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from cost_model.timed import KernelKey
from passes.ir.joint import first_value, map_operands, node_value, result_shapes, tensor_operands
from passes.ir.op_traits import op_kind, schema_arguments

_TIMED_KINDS = ("pointwise", "indexing", "reduction", "product", "opaque")
_LIBRARIES = ("aten.", "prims.", "autoshard.")
_PLACES = ("device", "layout", "pin_memory")
"""Arguments that say where, and not what."""
_OF_SHARDS = ("padding", "bias_sizes")
"""Arguments that differ between the global graph and a rank's: a shard with a halo is padded at the edges of space
only, and one of a part of the channels has a part of the bias."""


def may_be_timed(node: fx.Node, fused: bool) -> bool:
    """Whether `node`, of either graph, is a kernel that can be run by itself on invented values.

    fused: by a compiler, which runs only products and opaque ops as kernels of their own; all others are in fused
    groups (`passes.strategies.traffic`). An op that looks elements up by integers is none: which ones are looked
    up decides its time, and whether it may run.
    """
    kind = op_kind(node)
    operands = tensor_operands(node)
    if kind not in _TIMED_KINDS or not operands or not str(node.target).startswith(_LIBRARIES):
        return False
    if fused and kind not in ("product", "opaque"):
        return False
    integers = any(_is_integer(node_value(operand).dtype) for operand in operands)
    return not (integers and kind in ("indexing", "opaque"))


def dtype_of(node: fx.Node) -> str:
    """The word for a tensor in the form of an op."""
    return str(node_value(node).dtype)


def kernel_form(node: fx.Node, word: Callable[[fx.Node], str] = dtype_of) -> str:
    """The op with its arguments, for each tensor a word, its dtype unless `word` says otherwise. Of numbers that
    are no integers only that they are there: no time depends on them."""
    args, kwargs = map_operands(node, [_Word(word(operand)) for operand in tensor_operands(node)])
    names = [argument.name for argument in schema_arguments(node.target)][: len(args)]
    if any(name in _OF_SHARDS for name in names):
        args = tuple(arg for name, arg in zip(names, args, strict=True) if name not in _OF_SHARDS)
    named = {name: value for name, value in kwargs.items() if name not in _PLACES and value is not None}
    return f"{node.target}{_text(args)}{_text(named) if named else ''}"


def kernel_key(node: fx.Node, form: str, local_shape: Callable[[int], Sequence[int]]) -> KernelKey:
    """form: of `kernel_form`. local_shape: position of a tensor operand -> its shape as one rank has it."""
    operands = tensor_operands(node)
    shapes = tuple(tuple(local_shape(i)) for i in range(len(operands)))
    strides = (node_value(operand).stride() for operand in operands)
    return KernelKey(form, shapes, tuple(map(_order, shapes, strides)))


def operand_orders(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """What of a node's strides decides its keys, whatever its layouts."""
    values = [node_value(operand) for operand in tensor_operands(node)]
    return tuple(_order(value.shape, value.stride()) for value in values)


def local_key(node: fx.Node, form: str | None = None) -> KernelKey:
    """Of an op of one rank's graph. form: None: of the op alone."""
    operands = tensor_operands(node)
    return kernel_key(node, form or kernel_form(node), lambda i: node_value(operands[i]).shape)


def _order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    longer = (dim for dim, length in enumerate(shape) if length > 1)
    return tuple(sorted(longer, key=lambda dim: (-strides[dim], dim)))


class _Word(str):
    """Printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "float"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_text(entry)}' for name, entry in value.items())}}}"
    return "device" if isinstance(value, torch.device) else repr(value)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def class_key(node: fx.Node) -> Hashable:
    """Nodes with equal keys have equal rules, strategies and seconds."""
    tokens = [f"<{tuple(node_value(n).shape)} {node_value(n).dtype}>" for n in tensor_operands(node)]
    return (
        str(node.target),
        repr(map_operands(node, tokens)),
        str(result_shapes(node)),
        str(first_value(node).dtype),
        node.meta.get("rows"),
    )
