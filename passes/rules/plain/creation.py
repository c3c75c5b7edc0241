"""Ops that make tensors: every dim of the result may be split, each rank makes its part."""

from __future__ import annotations

from torch import fx

from passes.ir.joint import node_value
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, offset
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import LocalContext, Localize, OpRule
from passes.rules.plain.pointwise import broadcast_dims

__all__ = ["arange", "full", "iota", "uniform"]


def full(call: OpCall) -> OpRule:
    """-> a b"""
    return _made(call, lambda ctx: again(ctx, size=ctx.result_shape()))


def _made(call: OpCall, localize: Localize) -> OpRule:
    operands = [((),) * operand.ndim for operand in call.operands]
    result = broadcast_dims(call.result.ndim, call.result.ndim)
    return assemble(call.shapes, operands, [result], localize=localize)


def arange(call: OpCall) -> OpRule:
    """Splits if start and step are whole numbers: only then is a part's start exact."""
    exact = all(v == int(v) for v in (call["start"], call["step"]))
    return assemble(call.shapes, [], [[("d0",)]], whole=() if exact else ["d0"], localize=_arange)


def _arange(ctx: LocalContext) -> fx.Node:
    """[start + lo * step, start + hi * step): int(...) keeps an integer range an integer range."""
    if not ctx.is_split("d0"):
        return again(ctx)
    start, step = (int(argument(ctx, name)) for name in ("start", "step"))
    low, high = ctx.interval("d0")
    dtype = node_value(ctx.node).dtype
    return again(ctx, start=start + low * step, end=start + high * step, step=step, dtype=dtype)


def iota(call: OpCall) -> OpRule:
    """prims.iota(length, start=, step=, ...)"""
    return assemble(call.shapes, [], [[("d0",)]], localize=_iota)


def _iota(ctx: LocalContext) -> fx.Node:
    low = offset(ctx, "d0")
    start = argument(ctx, "start") + low * argument(ctx, "step")
    return again(ctx, length=ctx.result_shape()[0], start=start)


def uniform(call: OpCall) -> OpRule:
    """Elements are numbered in global coordinates, so a part is the same numbers wherever it is made."""
    return _made(call, _uniform)


def _uniform(ctx: LocalContext) -> fx.Node:
    start = [begin + offset(ctx, f"d{i}") for i, begin in enumerate(argument(ctx, "offset"))]
    return again(ctx, shape=ctx.result_shape(), offset=start)
