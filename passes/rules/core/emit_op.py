"""Small pieces that `localize` functions are made of. They emit ops that every backend lowers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.ir.op_schema import named_arguments, schema_arguments
from passes.rules.core.rule import LocalContext

__all__ = [
    "again",
    "argument",
    "aten",
    "constant",
    "filled",
    "first_part",
    "global_tensor",
    "is_empty",
    "local_index",
    "offset",
    "positions",
    "with_ones",
    "zero_where",
]

aten = torch.ops.aten


def argument(ctx: LocalContext, name: str) -> Any:
    """This rank's argument called `name` in the op's schema; its default if it is not given."""
    return named_arguments(ctx.node.target, ctx.args, ctx.kwargs)[name]


def global_tensor(ctx: LocalContext, name: str) -> torch.Tensor:
    """The global value of the tensor argument `name`."""
    return node_value(named_arguments(ctx.node.target, ctx.node.args, ctx.node.kwargs)[name])


def again(ctx: LocalContext, **changes: Any) -> fx.Node:
    """Emit the same op on the local arguments, with some of them changed by name."""
    names = [argument.name for argument in schema_arguments(ctx.node.target)]
    args = [changes.pop(name, arg) for name, arg in zip(names, ctx.args, strict=False)]
    assert changes.keys() <= set(names), f"{ctx.node.target} has no argument {changes}"
    return ctx.call(ctx.node.target, *args, **{**ctx.kwargs, **changes})  # type: ignore[arg-type]


def positions(ctx: LocalContext, *bounds: int, dtype: torch.dtype = torch.int64) -> fx.Node:
    """[start, start + step, ..., end), beside result 0. bounds: start, end, step."""
    device = node_value(ctx.node).device
    bounds = (*bounds, 1)[:3]
    return ctx.call(aten.arange.start_step, *bounds, dtype=dtype, device=device, pin_memory=False)


def offset(ctx: LocalContext, factor: str) -> int:
    """Where this rank's interval of `factor` begins; 0 if it is not split, or of size 1."""
    return ctx.interval(factor)[0] if ctx.is_split(factor) else 0


def is_empty(ctx: LocalContext, factor: str) -> bool:
    """Whether `factor` is split and this rank has none of it."""
    if not ctx.is_split(factor):
        return False
    low, high = ctx.interval(factor)
    return low == high


def first_part(ctx: LocalContext, factors: Iterable[str]) -> bool:
    """Whether this rank is the one, of those that split `factors`, that adds what must be added once.

    The first shard of a factor is never empty, so exactly one rank has offset 0 in all of them.
    """
    return all(offset(ctx, factor) == 0 and not is_empty(ctx, factor) for factor in factors)


def constant(ctx: LocalContext, value: float | bool, index: int = 0) -> fx.Node:
    """Result `index` filled with `value`: its local shape, dtype and device."""
    like = node_value(ctx.node, index)
    return filled(ctx, ctx.result_shape(index), value, like)


def filled(ctx: LocalContext, shape: list[int], value: float | bool, like: torch.Tensor) -> fx.Node:
    """A tensor of `value` with dtype and device of `like`."""
    return ctx.call(aten.full.default, shape, value, dtype=like.dtype, device=like.device, pin_memory=False)


def local_index(ctx: LocalContext, index: fx.Node, factor: str) -> tuple[fx.Node, fx.Node]:
    """Global positions along `factor` as positions in this rank's interval [lo, hi).

    Returns (clamped index, mask that is True where the position is not this rank's).
    """
    low, high = ctx.interval(factor)
    shifted = ctx.call(aten.sub.Tensor, index, low)
    below = ctx.call(aten.lt.Scalar, shifted, 0)
    above = ctx.call(aten.ge.Scalar, shifted, high - low)
    outside = ctx.call(aten.logical_or.default, below, above)
    return ctx.call(aten.clamp.default, shifted, 0, high - low - 1), outside


def zero_where(ctx: LocalContext, mask: fx.Node, value: fx.Node, like: torch.Tensor) -> fx.Node:
    """`value`, of dtype and device of `like`, with zeros where `mask` (broadcast) holds."""
    return ctx.call(aten.where.self, mask, filled(ctx, [], 0, like), value)


def with_ones(ctx: LocalContext, mask: fx.Node, after: int) -> fx.Node:
    """`mask` followed by `after` dims of size 1."""
    for _ in range(after):
        mask = ctx.call(aten.unsqueeze.default, mask, -1)
    return mask
