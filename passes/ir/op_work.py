"""The work of an op: how many operations it does, by what measured rate, and which operands it reads.

What kind of op it is: `passes.ir.op_traits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import fx

from cost_model.measurements import KernelKind
from passes.ir.joint import first_value, node_value, tensor_operands
from passes.ir.op_traits import fuses, named_arguments, op_name, reads_shape_only
from passes.ops.attention_window import keys_multiplied
from passes.rules.windowed.windowed import per_dim

_aten = torch.ops.aten

_MATRIX_PRODUCTS = (
    _aten.mm.default,
    _aten.bmm.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.mv.default,
    _aten.dot.default,
)
_NARROW_PRODUCTS = (_aten._scaled_mm.default, _aten._int_mm.default)
"""Products of floats of 8 bits with their scales, and of integers of 8 bits."""

_SHAPE_OF_INPUT = ("aten.avg_pool", "aten.reflection_pad", "aten.replication_pad")
"""Ops whose gradients take the input, as operand 1, for its shape."""


def reads_values(node: fx.Node) -> tuple[bool, ...]:
    """Per tensor operand, whether the op reads its elements; of some, creations and gradients only need the shape."""
    count = len(tensor_operands(node))
    if reads_shape_only(node):
        return (False, *(True,) * (count - 1))
    if node.target is _aten.convolution_backward.default:
        of_input, *of_others = (bool(wanted) for wanted in cast(Sequence[bool], node.args[10]))
        return (True, any(of_others), of_input)
    name = op_name(node).removesuffix(".default")
    if name.endswith("_backward") and name.startswith(_SHAPE_OF_INPUT):
        return tuple(position != 1 for position in range(count))
    return (True,) * count


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
    if target in _NARROW_PRODUCTS:
        return 2.0 * node_value(node).numel() * node_value(tensor_operands(node)[0]).shape[-1]
    if target in _routed():
        return _routed_flops(node)
    if target is torch.ops.autoshard.attention.default:
        return 4.0 * _attention_volume(node, 0)
    if target is torch.ops.autoshard.attention_backward.default:
        return 10.0 * _attention_volume(node, 1)
    if target is torch.ops.autoshard.neighborhood_attention.default:
        return 4.0 * _neighborhood_volume(node, 0)
    if target is torch.ops.autoshard.neighborhood_attention_backward.default:
        return 10.0 * _neighborhood_volume(node, 1)
    if target is _aten.convolution.default:
        x, weight = (node_value(n) for n in tensor_operands(node)[:2])
        return _convolution_flops(x if node.args[6] else node_value(node), weight)
    if target is _aten.convolution_backward.default:
        grad, x, weight = (node_value(n) for n in tensor_operands(node)[:3])
        wanted = sum(map(bool, cast(Sequence[bool], node.args[10])[:2]))
        return wanted * _convolution_flops(x if node.args[7] else grad, weight)
    if target is _aten.max_pool2d_with_indices.default:
        return float(node_value(node).numel() * math.prod(per_dim(node.args[1], 2)))  # type: ignore[arg-type]
    return 0.0


def arithmetic_kind(node: fx.Node, local_shape: Callable[[int], Sequence[int]]) -> KernelKind | None:
    """By what measured rate the operations of `node` run; None: pointwise and the like.

    local_shape: position of a tensor operand -> its shape as one rank has it.
    """
    if node.target is _aten.convolution.default:
        return _convolution_kind(node, 1, cast(int, node.args[8]), local_shape)
    if node.target is _aten.convolution_backward.default:
        return _convolution_kind(node, 2, cast(int, node.args[9]), local_shape)
    if node.target in _attentions():
        return "attention"
    if node.target is _aten.max_pool2d_with_indices.default:
        return "pooling"
    return None if fuses(node) else "matmul"


def rate_name(node: fx.Node) -> str:
    """By which a profile has the op's rate: its dtype, "float8" of all of 8 bits; of a product of these, theirs."""
    narrow = node.target in _NARROW_PRODUCTS
    dtype = (node_value(tensor_operands(node)[0]) if narrow else first_value(node)).dtype
    return "float8" if dtype.is_floating_point and dtype.itemsize == 1 else str(dtype).removeprefix("torch.")


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


def _routed() -> tuple[Any, ...]:
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
