"""Resizing by nearest neighbour and by linear interpolation: space is split by its results.

A rank computes where its results lie in the whole input, and picks or mixes what it has read of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.joint import node_value, tensor_operands
from passes.rules.assemble import assemble
from passes.rules.emit import again, argument, aten
from passes.rules.empty import empty_safe
from passes.rules.opcall import Builder, OpCall
from passes.rules.rule import LocalContext, OpRule
from passes.rules.space import results_of, scattered, space_dims, space_factor, split_dims
from passes.torch_compat import schema_arguments
from passes.windows import LinearResize, NearestResize

__all__ = ["resize", "resize_backward"]

Resizing = LinearResize | NearestResize


def resize(space: int) -> Builder:
    """... *window(y) -> ... *y"""
    return _rule(space, backward=False)


def resize_backward(space: int) -> Builder:
    """... *y -> ... *window(y)"""
    return _rule(space, backward=True)


def _rule(space: int, backward: bool) -> Builder:
    @empty_safe
    def build(call: OpCall) -> OpRule:
        operand, result = call.operands[0].shape, call.result.shape
        lead = len(operand) - space
        input_, output = (result, operand) if backward else (operand, result)
        dims = space_dims(len(operand), space)
        precise = not backward and call.result.dtype == torch.float64
        windows = _resizings(input_[lead:], output[lead:], call.arguments, precise)
        return assemble(
            call.shapes,
            [dims],
            [dims],
            linear=[frozenset({0})],
            windows={(int(backward), lead + d): window for d, window in enumerate(windows)},
            localize=_localize_backward if backward else _localize,
        )

    return build


def _resizings(
    lengths: Sequence[int], results: Sequence[int], arguments: Mapping[str, Any], precise: bool
) -> list[Resizing]:
    """One per dim of space, from the op's arguments by name. precise: see `NearestResize`."""
    scales = _scales(arguments, len(lengths))
    pairs = zip(lengths, results, scales, strict=True)
    if "align_corners" not in arguments:
        return [NearestResize(n, _nearest_ratio(n, m, scale), precise) for n, m, scale in pairs]
    corners = bool(arguments["align_corners"])
    return [LinearResize(n, _linear_ratio(n, m, scale, corners), corners) for n, m, scale in pairs]


def _scales(arguments: Mapping[str, Any], space: int) -> list[float | None]:
    """Results per operand position that the caller named, per dim; None: the quotient of the sizes counts."""
    if "scale_factors" in arguments:
        return list(arguments["scale_factors"] or [None] * space)
    names = ("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w")[-space:]
    return [arguments[name] for name in names]


def _nearest_ratio(length: int, results: int, scale: float | None) -> float:
    return 1.0 / scale if scale else length / results


def _linear_ratio(length: int, results: int, scale: float | None, align_corners: bool) -> float:
    """[torch: area_pixel_compute_scale]"""
    if length == results:
        return 1.0
    if align_corners:
        return (length - 1) / (results - 1) if results > 1 else 0.0
    return 1.0 / scale if scale else length / results


def _site(ctx: LocalContext, backward: bool) -> tuple[int, list[Resizing], list[tuple[int, int]]]:
    """First dim of space; per dim its resizing, and this rank's results."""
    given, made = node_value(tensor_operands(ctx.node)[0]).shape, node_value(ctx.node).shape
    input_, output = (made, given) if backward else (given, made)
    names = [arg.name for arg in schema_arguments(ctx.node.target)]
    space = sum(ctx_name in names for ctx_name in ("scales", "scales_d", "scales_h", "scales_w"))
    space = space or len(argument(ctx, "scale_factors") or argument(ctx, "output_size"))
    lead = len(given) - space
    precise = not backward and node_value(ctx.node).dtype == torch.float64
    arguments = {name: argument(ctx, name) for name in names[1:]}
    resizings = _resizings(input_[lead:], output[lead:], arguments, precise)
    spans = [results_of(ctx, d, output[lead + d]) for d in range(space)]
    return lead, resizings, spans


def _localize(ctx: LocalContext) -> fx.Node:
    lead, resizings, spans = _site(ctx, backward=False)
    if not split_dims(ctx, len(spans)):
        return again(ctx)
    x = ctx.args[0]
    for d, (resizing, span) in enumerate(zip(resizings, spans, strict=True)):
        near, far, weight = _places(ctx, resizing, span, _first(ctx, d, resizing, span), len(spans) - 1 - d)
        low = ctx.call(aten.index_select.default, x, lead + d, near)
        if far is None or weight is None:
            x = low
            continue
        high = ctx.call(aten.index_select.default, x, lead + d, far)
        rest = ctx.call(aten.rsub.Scalar, weight, 1.0)
        parts = (
            ctx.call(aten.mul.Tensor, low, rest),
            ctx.call(aten.mul.Tensor, high, weight),
        )
        x = ctx.call(aten.add.Tensor, *parts)
    return x


def _localize_backward(ctx: LocalContext) -> fx.Node:
    lead, resizings, spans = _site(ctx, backward=True)
    if not split_dims(ctx, len(spans)):
        return again(ctx, input_size=ctx.result_shape())
    grad = ctx.args[0]
    shape = ctx.result_shape()
    for d, (resizing, span) in reversed(list(enumerate(zip(resizings, spans, strict=True)))):
        near, far, weight = _places(ctx, resizing, span, _first(ctx, d, resizing, span), len(spans) - 1 - d)
        sizes = [*shape[:lead], *(hi - lo for lo, hi in spans[:d]), *shape[lead + d :]]
        if far is None or weight is None:
            grad = scattered(ctx, grad, sizes, lead + d, (near, grad))
            continue
        rest = ctx.call(aten.rsub.Scalar, weight, 1.0)
        low, high = ctx.call(aten.mul.Tensor, grad, rest), ctx.call(aten.mul.Tensor, grad, weight)
        grad = scattered(ctx, grad, sizes, lead + d, (near, low), (far, high))
    return grad


def _first(ctx: LocalContext, dim: int, resizing: Resizing, span: tuple[int, int]) -> int:
    """Where in the whole input this rank's part of it begins."""
    return resizing.reads(*span)[0] if ctx.is_split(space_factor(dim)) else 0


def _places(
    ctx: LocalContext, resizing: Resizing, span: tuple[int, int], first: int, after: int
) -> tuple[fx.Node, fx.Node | None, fx.Node | None]:
    """Per result of `span` the position below and the one above it in this rank's input, and the upper one's weight,
    shaped for `after` dims behind it. Nearest neighbour has only one."""
    like = node_value(ctx.node)
    places: dict[str, Any] = {"device": like.device, "pin_memory": False}
    if isinstance(resizing, NearestResize):
        dtype = torch.float64 if resizing.precise else torch.float32
        at = ctx.call(aten.arange.start_step, *span, 1, dtype=dtype, **places)
        below = _integers(ctx, ctx.call(aten.mul.Tensor, at, resizing.ratio), resizing.length)
        return ctx.call(aten.sub.Tensor, below, first), None, None
    at = ctx.call(aten.arange.start_step, *span, 1, dtype=torch.float64, **places)
    if resizing.align_corners:
        at = ctx.call(aten.mul.Tensor, at, resizing.ratio)
    else:
        at = ctx.call(aten.mul.Tensor, ctx.call(aten.add.Tensor, at, 0.5), resizing.ratio)
        at = ctx.call(aten.clamp.default, ctx.call(aten.sub.Tensor, at, 0.5), 0.0)
    below = _integers(ctx, at, resizing.length)
    weight = ctx.call(aten._to_copy.default, ctx.call(aten.sub.Tensor, at, below), dtype=like.dtype)
    above = ctx.call(aten.clamp.default, ctx.call(aten.add.Tensor, below, 1), None, resizing.length - 1)
    near, far = (ctx.call(aten.sub.Tensor, place, first) for place in (below, above))
    return near, far, ctx.call(aten.view.default, weight, [-1, *[1] * after])


def _integers(ctx: LocalContext, at: fx.Node, length: int) -> fx.Node:
    """The position at or below each, at most the last."""
    whole = ctx.call(aten._to_copy.default, ctx.call(aten.floor.default, at), dtype=torch.int64)
    return ctx.call(aten.clamp.default, whole, None, length - 1)
