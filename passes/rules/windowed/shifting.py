"""Ops that move data along a dim: they cut, join, pad, turn or roll it. The dim is split by its results, which read
elsewhere (`split`: by its operand, whose parts go to the results they belong to); the others pass through.

What a rank has read of the operands is already all that its results need, and in order: its op is the same on less of
them, or nothing at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from passes.ir.joint import node_value, tensor_operands
from passes.ir.op_traits import slice_ends
from passes.layout.windows import MirroredWindow, PeriodicWindow, SlidingWindow, TransposedWindow, Window
from passes.rules.core.assemble import Groups, again, argument, broadcast_dims, constant, rule_of, whole_rule
from passes.rules.core.rule import LocalContext, Localize, OpCall, OpRule

aten = torch.ops.aten


def _factor(dim: int) -> str:
    return f"d{dim}"


def _shared(
    call: OpCall, windows: Mapping[tuple[int, int], Window], linear: Groups, localize: Localize | None
) -> OpRule:
    """All tensors have the same dims, some seen through windows."""
    dims = broadcast_dims(call.operands[0].ndim)
    rule = rule_of(
        call,
        [dims] * len(call.operands),
        [dims] * len(call.results),
        linear=linear,
        windows=windows,
        localize=localize,
    )
    moved = {_factor(d) for _, d in windows}
    return replace(rule, moved=frozenset(moved & rule.sizes.keys()))


def slice_(call: OpCall) -> OpRule:
    """a window(b) -> a b"""
    source, linear = call.operands[0].shape, "self"
    dim = call["dim"] % max(1, len(source))
    step = int(call["step"] or 1)
    if source == call.result.shape:
        return _shared(call, {}, linear, lambda ctx: again(ctx, start=0, end=sys.maxsize))
    first, _ = slice_ends(call["start"], call["end"], source[dim])
    window = SlidingWindow(source[dim], 1, step, before=-first)
    return _shared(call, {(0, dim): window}, linear, lambda ctx: _slice(ctx, dim, step))


def _slice(ctx: LocalContext, dim: int, step: int) -> fx.Node:
    if not ctx.is_split(_factor(dim)):
        return again(ctx)
    return argument(ctx, "self") if step == 1 else again(ctx, start=0, end=sys.maxsize)


def slice_backward(call: OpCall) -> OpRule:
    """a window(b) -> a b: zeros around the slice, and between its steps."""
    shape = call.result.shape
    dim, step = call["dim"] % len(shape), int(call["step"])
    first, _ = slice_ends(call["start"], call["end"], shape[dim])
    window = TransposedWindow(call.operands[0].shape[dim], 1, step, before=-first)
    linear = "grad_output"
    return _shared(call, {(0, dim): window}, linear, lambda ctx: _slice_backward(ctx, dim, window))


def _slice_backward(ctx: LocalContext, dim: int, window: TransposedWindow) -> fx.Node:
    sizes = ctx.result_shape()
    if not ctx.is_split(_factor(dim)):
        return again(ctx, input_sizes=sizes)
    lo, hi = ctx.interval(_factor(dim))
    first, last = window.reads(lo, hi)
    if first == last:
        return constant(ctx, 0)
    start, end = window.reach(first, last)
    return again(ctx, input_sizes=sizes, start=start - lo, end=end - lo)


def cat(call: OpCall) -> OpRule:
    """a window(b), a window(b) -> a b"""
    dim = call["dim"] % call.result.ndim
    pieces = _side_by_side([operand.shape[dim] for operand in call.operands])
    windows = {(i, dim): piece for i, piece in enumerate(pieces)}
    return _shared(call, windows, "tensors", lambda ctx: _cat(ctx, dim, pieces))


def _side_by_side(lengths: Sequence[int]) -> list[SlidingWindow]:
    """Of each piece of a dim, what positions of the dim read of it."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [SlidingWindow(n, 1, before=end - n) for n, end in zip(lengths, ends, strict=True)]


def _cat(ctx: LocalContext, dim: int, pieces: Sequence[SlidingWindow]) -> fx.Node:
    if not ctx.is_split(_factor(dim)):
        return again(ctx)
    spans = [piece.reads(*ctx.interval(_factor(dim))) for piece in pieces]
    read = [i for i, (lo, hi) in enumerate(spans) if lo < hi]
    if not read:
        return constant(ctx, 0)
    local = argument(ctx, "tensors")
    alike = node_value(tensor_operands(ctx.node)[read[0]]).dtype == node_value(ctx.node).dtype
    return local[read[0]] if len(read) == 1 and alike else again(ctx, tensors=[local[i] for i in read])


def split(call: OpCall) -> OpRule:
    """a b -> a window(b), a window(b)"""
    dim = call["dim"] % call.operands[0].ndim
    lengths = [result.shape[dim] for result in call.results if result is not None]
    pieces = _side_by_side(lengths)
    return _shared(
        call,
        {(1 + i, dim): piece for i, piece in enumerate(pieces)},
        "self",
        lambda ctx: _split(ctx, dim, pieces),
    )


def _split(ctx: LocalContext, dim: int, pieces: Sequence[SlidingWindow]) -> fx.Node:
    if not ctx.is_split(_factor(dim)):
        return again(ctx)
    spans = [piece.reads(*ctx.interval(_factor(dim))) for piece in pieces]
    sizes = [hi - lo for lo, hi in spans]
    return ctx.call(aten.split_with_sizes.default, argument(ctx, "self"), sizes, dim)


def _amounts(ndim: int, flat: Sequence[int]) -> list[tuple[int, int]]:
    """Per dim (before, after): the pairs of a padding count from the last dim."""
    pairs = list(zip(flat[::2], flat[1::2], strict=True))[::-1]
    return [(0, 0)] * (ndim - len(pairs)) + [(int(b), int(a)) for b, a in pairs]


def _flat(amounts: Sequence[tuple[int, int]]) -> list[int]:
    return [n for pair in reversed(amounts) for n in pair]


def pad(call: OpCall) -> OpRule:
    """a window(b) -> a b; negative amounts cut. Linear if the padding is 0."""
    shape = call.operands[0].shape
    amounts = _amounts(len(shape), call["pad"])
    windows = {
        d: SlidingWindow(shape[d], 1, before=before)
        for d, (before, after) in enumerate(amounts)
        if before or after
    }
    return _shared(
        call,
        {(0, d): window for d, window in windows.items()},
        "self value",
        lambda ctx: _pad(ctx, amounts, windows),
    )


def _pad(
    ctx: LocalContext, amounts: Sequence[tuple[int, int]], windows: Mapping[int, SlidingWindow]
) -> fx.Node:
    own = list(amounts)
    for d, window in windows.items():
        if ctx.is_split(_factor(d)):
            own[d] = window.padding(*ctx.interval(_factor(d)))
    return again(ctx, pad=_flat(own)) if any(map(any, own)) else argument(ctx, "self")


def flip(call: OpCall) -> OpRule:
    """a window(b) -> a b"""
    shape = call.result.shape
    windows = {(0, d % len(shape)): MirroredWindow(shape[d]) for d in call["dims"] if shape}
    return _shared(call, windows, "self", again)


def roll(call: OpCall) -> OpRule:
    """a window(b) -> a b. Without "dims" the tensor rolls as one: nothing can be split."""
    shape, linear = call.result.shape, "self"
    if not call["dims"]:
        return whole_rule(call, linear)
    shifts: dict[int, int] = {}
    for dim, shift in zip(call["dims"], call["shifts"], strict=True) if shape else ():
        shifts[dim % len(shape)] = shifts.get(dim % len(shape), 0) + shift
    windows = {(0, d): PeriodicWindow(shape[d], shift % shape[d]) for d, shift in shifts.items()}
    return _shared(call, windows, linear, lambda ctx: _roll(ctx, shifts))


def _roll(ctx: LocalContext, shifts: Mapping[int, int]) -> fx.Node:
    left = {d: shift for d, shift in shifts.items() if not ctx.is_split(_factor(d))}
    return again(ctx, shifts=list(left.values()), dims=list(left)) if left else argument(ctx, "self")


def circular_pad(call: OpCall) -> OpRule:
    """a window(b) -> a b"""
    windows = _circles(call.operands[0].shape, call["pads"])
    return _shared(call, {(0, d): w for d, w in windows.items()}, "x", _circular)


def circular_pad_backward(call: OpCall) -> OpRule:
    """a b -> a window(b)"""
    windows = _circles(call.result.shape, call["pads"])
    return _shared(call, {(1, d): w for d, w in windows.items()}, "grad", _circular)


def _circles(shape: Sequence[int], pads: Sequence[int]) -> dict[int, PeriodicWindow]:
    """Of the padded dims; shape: without the padding."""
    amounts = _amounts(len(shape), pads)
    return {
        d: PeriodicWindow(shape[d], before) for d, (before, after) in enumerate(amounts) if before or after
    }


def _circular(ctx: LocalContext) -> fx.Node:
    """A rank has read its padding with the rest; what of a gradient belongs elsewhere is added up there."""
    x = tensor_operands(ctx.node)[0]
    amounts = _amounts(node_value(x).ndim, argument(ctx, "pads"))
    left = [(0, 0) if ctx.is_split(_factor(d)) else pair for d, pair in enumerate(amounts)]
    return again(ctx, pads=_flat(left)) if any(map(any, left)) else ctx.args[0]
