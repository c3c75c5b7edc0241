"""Ranks with nothing to do: a dim smaller than its mesh axis leaves some without any of it, and many
ops refuse empty tensors. Such a rank contributes the neutral value instead of running the op."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.rules.core.emit_op import again, constant, is_empty
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import Dim, LocalContext, OpRule

__all__ = ["empty_safe", "neutral", "neutral_where_empty"]


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
