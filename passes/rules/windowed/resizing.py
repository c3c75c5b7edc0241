"""Resizing by nearest neighbour, linear and cubic interpolation, antialiased or not: space is split by its results.

A rank computes where its results lie in the whole input, and picks or mixes what it has read of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value, tensor_operands
from passes.ir.op_schema import schema_arguments
from passes.layout.layout import Span
from passes.layout.windows import AntialiasResize, CubicResize, LinearResize, NearestResize
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import LocalContext, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.windowed.interpolation import Resizing, resized_taps
from passes.rules.windowed.taps import mixed, mixed_back
from passes.rules.windowed.windows_in_space import results_of, space_dims, space_factor, split_dims

__all__ = ["resize", "resize_backward"]


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
        precise = not backward and _is_precise(call.result.dtype, output[lead:])
        windows = _resizings(str(call.target), input_[lead:], output[lead:], call.arguments, precise)
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
    name: str, lengths: Sequence[int], results: Sequence[int], arguments: Mapping[str, Any], precise: bool
) -> list[Resizing]:
    """One per dim of space, from the op's name and its arguments by name. precise: see `NearestResize`."""
    scales = _scales(arguments, len(lengths))
    pairs = zip(lengths, results, scales, strict=True)
    if "align_corners" not in arguments:
        offset = 0.5 if "nearest_exact" in name else 0.0
        return [NearestResize(n, _nearest_ratio(n, m, scale), precise, offset) for n, m, scale in pairs]
    corners = bool(arguments["align_corners"])
    ratios = [(n, _ratio(n, m, scale, corners)) for n, m, scale in pairs]
    if "_aa" in name:
        return [AntialiasResize(n, ratio, 2 if "cubic" in name else 1) for n, ratio in ratios]
    make = CubicResize if "cubic" in name else LinearResize
    return [make(n, ratio, corners) for n, ratio in ratios]


def _scales(arguments: Mapping[str, Any], space: int) -> list[float | None]:
    """Results per operand position that the caller named, per dim; None: the quotient of the sizes counts."""
    if "scale_factors" in arguments:
        return list(arguments["scale_factors"] or [None] * space)
    names = ("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w")[-space:]
    return [arguments[name] for name in names]


def _is_precise(dtype: torch.dtype, results: Sequence[int]) -> bool:
    """Whether the forward multiplies in float64; of small planes it does not.   [torch 2.13: UpSampleKernel.cpp]"""
    return dtype == torch.float64 and not (len(results) == 2 and sum(results) <= 128)


def _nearest_ratio(length: int, results: int, scale: float | None) -> float:
    return 1.0 / scale if scale else length / results


def _ratio(length: int, results: int, scale: float | None, align_corners: bool) -> float:
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
    precise = not backward and _is_precise(node_value(ctx.node).dtype, output[lead:])
    arguments = {name: argument(ctx, name) for name in names[1:]}
    resizings = _resizings(str(ctx.node.target), input_[lead:], output[lead:], arguments, precise)
    spans = [results_of(ctx, d, output[lead + d]) for d in range(space)]
    return lead, resizings, spans


def _localize(ctx: LocalContext) -> fx.Node:
    lead, resizings, spans = _site(ctx, backward=False)
    if not split_dims(ctx, len(spans)):
        return again(ctx)
    x, like = ctx.args[0], node_value(ctx.node)
    held = [
        _held(ctx, d, resizing, span) for d, (resizing, span) in enumerate(zip(resizings, spans, strict=True))
    ]
    shape = [*ctx.result_shape()[:lead], *(hi - lo for lo, hi in held)]
    for d, resizing in enumerate(resizings):
        x = mixed(ctx, x, shape, lead + d, resized_taps(ctx, resizing, spans[d], held[d], like))
        shape[lead + d] = spans[d][1] - spans[d][0]
    return x


def _localize_backward(ctx: LocalContext) -> fx.Node:
    lead, resizings, spans = _site(ctx, backward=True)
    if not split_dims(ctx, len(spans)):
        return again(ctx, input_size=ctx.result_shape())
    grad, like, shape = ctx.args[0], node_value(ctx.node), ctx.result_shape()
    for d, (resizing, span) in reversed(list(enumerate(zip(resizings, spans, strict=True)))):
        found = resized_taps(ctx, resizing, span, _held(ctx, d, resizing, span), like)
        sizes = [*shape[:lead], *(hi - lo for lo, hi in spans[:d]), *shape[lead + d :]]
        grad = mixed_back(ctx, grad, sizes, lead + d, found)
    return grad


def _held(ctx: LocalContext, dim: int, resizing: Resizing, span: Span) -> Span:
    """What this rank has of the input along `dim`."""
    return resizing.reads(*span) if ctx.is_split(space_factor(dim)) else (0, resizing.length)
