"""The work of an op: how many operations it does, by what measured rate, and which operands it reads.

What kind of op it is: `passes.ir.op_traits`.

What an op is timed as: equal for ops that take equally long, in the global graph and in a rank's; and what of an op
decides its strategies and their prices: layers that are alike share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import fx

from cost_model.measurements import KernelKind
from cost_model.timed import KernelKey
from passes.ir.joint import first_value, map_operands, node_value, result_shapes, tensor_operands
from passes.ir.op_traits import fuses, named_arguments, op_kind, schema_arguments
from passes.ops.attention_window import keys_multiplied
from passes.rules.windowed.windowed import per_dim

aten = torch.ops.aten

_MATRIX_PRODUCTS = (
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.mv.default,
    aten.dot.default,
)
NARROW_PRODUCTS = (aten._scaled_mm.default, aten._int_mm.default)
"""Products of floats of 8 bits with their scales, and of integers of 8 bits."""


def global_flops(node: fx.Node) -> float:
    """Floating point operations of the whole op, unsharded; 0 where memory traffic decides.

    Products and convolutions: 2 per multiply-add. Attention: two products of s x t x d forward,
    five backward (it recomputes the scores), half of that when causal; within a window, of the keys of a block.
    Neighbourhood attention: the same products, of each query with the keys it sees. Max-pooling: comparisons, forward
    only (its backward moves one value per window).
    """
    target = node.target
    if target is torch.ops.autoshard.contract.default:
        return _contract_flops(node)
    if target in _MATRIX_PRODUCTS:
        a = node_value(tensor_operands(node)[-2])
        return 2.0 * node_value(node).numel() * a.shape[-1]
    if target in NARROW_PRODUCTS:
        return 2.0 * node_value(node).numel() * node_value(tensor_operands(node)[0]).shape[-1]
    if target in routed_products():
        return _routed_flops(node)
    if target is torch.ops.autoshard.attention.default:
        return 4.0 * _attention_volume(node, 0)
    if target is torch.ops.autoshard.attention_backward.default:
        return 10.0 * _attention_volume(node, 1)
    if target is torch.ops.autoshard.neighborhood_attention.default:
        return 4.0 * _neighborhood_volume(node, 0)
    if target is torch.ops.autoshard.neighborhood_attention_backward.default:
        return 10.0 * _neighborhood_volume(node, 1)
    if target is aten.convolution.default:
        x, weight = (node_value(n) for n in tensor_operands(node)[:2])
        return _convolution_flops(x if node.args[6] else node_value(node), weight)
    if target is aten.convolution_backward.default:
        grad, x, weight = (node_value(n) for n in tensor_operands(node)[:3])
        wanted = sum(map(bool, cast(Sequence[bool], node.args[10])[:2]))
        return wanted * _convolution_flops(x if node.args[7] else grad, weight)
    if target is aten.max_pool2d_with_indices.default:
        return float(node_value(node).numel() * math.prod(per_dim(node.args[1], 2)))  # type: ignore[arg-type]
    return 0.0


def arithmetic_kind(node: fx.Node, local_shape: Callable[[int], Sequence[int]]) -> KernelKind | None:
    """By what measured rate the operations of `node` run; None: pointwise and the like.

    local_shape: position of a tensor operand -> its shape as one rank has it.
    """
    if node.target is aten.convolution.default:
        return _convolution_kind(node, 1, cast(int, node.args[8]), local_shape)
    if node.target is aten.convolution_backward.default:
        return _convolution_kind(node, 2, cast(int, node.args[9]), local_shape)
    if node.target in _attentions():
        return "attention"
    if node.target is aten.max_pool2d_with_indices.default:
        return "pooling"
    return None if fuses(node) else "matmul"


def _convolution_kind(
    node: fx.Node, weight: int, groups: int, local_shape: Callable[[int], Sequence[int]]
) -> KernelKind:
    """By the fewer of the channels that one group reads and makes; within groups they are never split."""
    shape = local_shape(weight) if groups == 1 else node_value(tensor_operands(node)[weight]).shape
    # Channels: CPUs convolve in vectors of as many (float32, AVX-512), and waste what they do not fill.
    return "narrow_convolution" if min(shape[0] // groups, shape[1]) < 16 else "convolution"


@cache
def _attentions() -> tuple[object, ...]:
    names = ("attention", "neighborhood_attention")
    ops = torch.ops.autoshard
    return tuple(getattr(ops, name + suffix).default for name in names for suffix in ("", "_backward"))


def _contract_flops(node: fx.Node) -> float:
    equation = str(node.args[2])
    terms = equation.replace("->", ",").split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms[:2], tensor_operands(node), strict=True):
        sizes.update(zip(term.split(), node_value(operand).shape, strict=True))
    return 2.0 * math.prod(sizes.values())


def routed_products() -> tuple[Any, ...]:
    """As many products as there are experts."""
    ops = torch.ops.autoshard
    return ops.routed_mm.default, ops.routed_outer.default, ops.grouped_mm.default


def _routed_flops(node: fx.Node) -> float:
    """Every row is taken to have one expert; experts to be equally loaded. The same of a rank's sorted rows."""
    a, b = (node_value(n) for n in tensor_operands(node)[:2])
    return 2.0 * a.numel() * b.shape[1 if node.kwargs.get("turned") else -1]


def _attention_volume(node: fx.Node, first: int) -> float:
    q, k = (node_value(n) for n in tensor_operands(node)[first : first + 2])
    given, keys = named_arguments(node.target, node.args, node.kwargs), k.shape[-2]
    if given["window"]:
        return float(q.numel() * keys_multiplied(keys, given["window"]))
    return q.numel() * keys * (0.5 if given["is_causal"] else 1.0)


def _neighborhood_volume(node: fx.Node, first: int) -> float:
    """Products of numbers in q k^T; `kernel_size` comes after q, k and v, of which q is argument `first`."""
    kernel_size: Any = node.args[first + 3]
    return float(node_value(tensor_operands(node)[first]).numel() * math.prod(kernel_size))


def _convolution_flops(y: torch.Tensor, weight: torch.Tensor) -> float:
    """y: the output, [n, co, *space], with a weight of [co, ci / groups, *kernel]; transposed, the input likewise."""
    return 2.0 * y.numel() * math.prod(weight.shape[1:])


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
    args, kwargs = map_operands(node, [Word(word(operand)) for operand in tensor_operands(node)])
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


class Word(str):
    """Printed without quotes."""

    __repr__ = str.__str__


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
