"""Ops that make tensors: every dim of the result may be split, each rank makes its part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from passes.ir.joint import node_value
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, aten, offset, sized
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import LocalContext, Localize, OpRule
from passes.rules.plain.pointwise import broadcast_dims

__all__ = ["arange", "created", "iota", "new_like", "uniform"]


def created(size: str = "size", localize: Localize | None = None) -> Builder:
    """-> a b: argument `size` is the result's shape."""
    return lambda call: _fill(call, localize or sized(size))


def _fill(call: OpCall, localize: Localize) -> OpRule:
    operands = [((),) * operand.ndim for operand in call.operands]
    result = broadcast_dims(call.result.ndim, call.result.ndim)
    return assemble(call.shapes, operands, [result], localize=localize)


def new_like(call: OpCall) -> OpRule:
    """new_zeros(x, size): x gives dtype and device only, but of x's own shape it can stay split."""
    source, ndim = call.operands[0], call.result.ndim
    same = source.shape == call.result.shape
    operand = broadcast_dims(ndim, ndim) if same else ((),) * source.ndim
    rest = [((),) * other.ndim for other in call.operands[1:]]
    return assemble(call.shapes, [operand, *rest], [broadcast_dims(ndim, ndim)], localize=sized("size"))


def arange(call: OpCall) -> OpRule:
    """Splits if start and step are whole numbers: only then is a part's start exact."""
    start, _, step = _progression([call.arguments.get(name) for name in ("start", "end", "step")])
    exact = all(isinstance(v, (int, float)) and v == int(v) for v in (start, step))
    return assemble(call.shapes, [], [[("d0",)]], whole=() if exact else ["d0"], localize=_arange)


def _progression(values: Sequence[float | None]) -> tuple[float, float | None, float]:
    start, end, step = values
    return 0 if start is None else start, end, 1 if step is None else step


def _arange(ctx: LocalContext) -> fx.Node:
    """[start + lo * step, start + hi * step): int(...) keeps an integer range an integer range."""
    if not ctx.is_split("d0"):
        return ctx.call(ctx.node.target, *ctx.args, **ctx.kwargs)  # type: ignore[arg-type]
    count = len(ctx.args)  # (end,), (start, end) or (start, end, step)
    given = (None, ctx.args[0], None) if count == 1 else (*ctx.args, None)[:3]
    start, _, step = (None if v is None else int(v) for v in _progression(given))
    assert start is not None and step is not None
    low, high = ctx.interval("d0")
    value = node_value(ctx.node)
    kwargs = {**ctx.kwargs, "dtype": value.dtype}
    return ctx.call(aten.arange.start_step, start + low * step, start + high * step, step, **kwargs)


def iota(call: OpCall) -> OpRule:
    """prims.iota(length, start=, step=, ...)"""
    return assemble(call.shapes, [], [[("d0",)]], localize=_iota)


def _iota(ctx: LocalContext) -> fx.Node:
    low = offset(ctx, "d0")
    start = argument(ctx, "start") + low * argument(ctx, "step")
    return again(ctx, length=ctx.result_shape()[0], start=start)


def uniform(call: OpCall) -> OpRule:
    """Elements are numbered in global coordinates, so a part is the same numbers wherever it is made."""
    return _fill(call, _uniform)


def _uniform(ctx: LocalContext) -> fx.Node:
    start = [begin + offset(ctx, f"d{i}") for i, begin in enumerate(argument(ctx, "offset"))]
    return again(ctx, shape=ctx.result_shape(), offset=start)
