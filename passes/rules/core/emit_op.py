"""Small pieces that `localize` functions are made of, and what a rank emits that has nothing to do.

They emit ops that every backend lowers. A dim smaller than its mesh axis leaves some ranks without any of it, and many
ops refuse empty tensors: such a rank contributes the neutral value instead of running the op.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.ir.op_traits import named_arguments, schema_arguments
from passes.rules.core.rule import Builder, Dim, LocalContext, OpCall, OpRule

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


def empty_safe(build: Builder) -> Builder:
    """The same rules, with `neutral_where_empty`."""

    def safe(call: OpCall) -> OpRule:
        return neutral_where_empty(build(call))

    return safe


def neutral_where_empty(rule: OpRule) -> OpRule:
    """`rule`, whose op is not run on a rank that has none of a split factor.

    Every result is there empty, if it has the factor, or holds what its reduction ignores (0 for a
    sum, -inf for a maximum). The op does run if a result neither has the factor nor reduces it: that
    result needs no part of it, and is whole on this rank too.
    """

    def localize(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
        missing = {factor for factor in rule.splittable if is_empty(ctx, factor)}
        wanted = _wanted(ctx)
        ops = {index: _ignored_by(rule, rule.results[index], missing) for index in wanted}
        if not missing or None in ops.values():
            return again(ctx) if rule.localize is None else rule.localize(ctx)
        values = {
            index: constant(ctx, neutral(op or "sum", node_value(ctx.node, index).dtype), index)
            for index, op in ops.items()
        }
        several = isinstance(ctx.node.meta["val"], (tuple, list))
        return tuple(values.get(i) for i in range(len(rule.results))) if several else values[0]

    return replace(rule, localize=localize)


def _wanted(ctx: LocalContext) -> list[int]:
    """The results that the op computes: some can be told to leave one out."""
    value = ctx.node.meta["val"]
    return [i for i, v in enumerate(value) if v is not None] if isinstance(value, (tuple, list)) else [0]


def _ignored_by(rule: OpRule, dims: tuple[Dim, ...], missing: set[str]) -> str | None:
    """The reduction for which a result with these dims must be neutral; None if it must be computed."""
    kept = {factor for dim in dims for factor in dim}
    reduced = [rule.reductions[factor] for factor in missing - kept if factor in rule.reductions]
    if reduced:
        return reduced[0]
    return "sum" if missing & kept else None


def neutral(op: str, dtype: torch.dtype) -> float | bool:
    """What leaves a reduction as it is: 0, or the least or greatest value of `dtype`."""
    if op == "sum":
        return 0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max
