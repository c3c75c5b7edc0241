"""Reflected and replicated padding: space is split by its results, which are positions of the input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.layout.windows import EdgePad
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, aten, global_tensor
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import LocalContext, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.windows_in_space import results_of, scattered, space_dims, space_factor, split_dims

__all__ = ["edge_pad", "edge_pad_backward"]


def edge_pad(space: int) -> Builder:
    """... *window(y) -> ... *y"""

    @empty_safe
    def build(call: OpCall) -> OpRule:
        dims = space_dims(call.tensor("self").ndim, space)
        return assemble(
            call.shapes,
            [dims],
            [dims],
            linear=linear_sets(call, "self"),
            windows={(0, len(dims) - space + d): pad for d, pad in enumerate(_pads_of(call, space))},
            localize=lambda ctx: _localize(ctx, space),
        )

    return build


def edge_pad_backward(space: int) -> Builder:
    """... *y, ... *window(y) -> ... *window(y)"""

    @empty_safe
    def build(call: OpCall) -> OpRule:
        dims = space_dims(call.tensor("self").ndim, space)
        return assemble(
            call.shapes,
            [dims, dims],
            [dims],
            linear=linear_sets(call, "grad_output"),
            windows={
                (t, len(dims) - space + d): pad for t in (1, 2) for d, pad in enumerate(_pads_of(call, space))
            },
            localize=lambda ctx: _localize_backward(ctx, space),
        )

    return build


def _pads_of(call: OpCall, space: int) -> list[EdgePad]:
    return _pads(call.tensor("self").shape[-space:], call["padding"], "reflection" in str(call.target))


def _pads(lengths: Sequence[int], padding: Sequence[int], reflects: bool) -> list[EdgePad]:
    """One per dim of space. padding: (before, after) of the last dim first."""
    before = list(padding[::2])[::-1]
    return [EdgePad(int(n), int(b), reflects) for n, b in zip(lengths, before, strict=True)]


def _places(ctx: LocalContext, space: int) -> list[fx.Node]:
    """Per dim of space, the position in this rank's input of each of its results."""
    lengths = global_tensor(ctx, "self").shape[-space:]
    pads = _pads(lengths, argument(ctx, "padding"), "reflection" in str(ctx.node.target))
    after = [int(n) for n in argument(ctx, "padding")][1::2][::-1]
    return [
        _place(ctx, pad, d, pad.length + pad.before + end)
        for d, (pad, end) in enumerate(zip(pads, after, strict=True))
    ]


def _place(ctx: LocalContext, pad: EdgePad, dim: int, results: int) -> fx.Node:
    lo, hi = results_of(ctx, dim, results)
    first = pad.reads(lo, hi)[0] if ctx.is_split(space_factor(dim)) else 0
    device = node_value(ctx.node).device
    at = ctx.call(
        aten.arange.start_step,
        lo - pad.before,
        hi - pad.before,
        1,
        dtype=torch.int64,
        device=device,
        pin_memory=False,
    )
    if pad.reflects:
        at = ctx.call(aten.rsub.Scalar, ctx.call(aten.abs.default, at), pad.length - 1)
        at = ctx.call(aten.rsub.Scalar, ctx.call(aten.abs.default, at), pad.length - 1)
    else:
        at = ctx.call(aten.clamp.default, at, 0, pad.length - 1)
    return ctx.call(aten.sub.Tensor, at, first) if first else at


def _localize(ctx: LocalContext, space: int) -> fx.Node:
    if not split_dims(ctx, space):
        return again(ctx)
    x = argument(ctx, "self")
    lead = global_tensor(ctx, "self").ndim - space
    for d, places in enumerate(_places(ctx, space)):
        x = ctx.call(aten.index_select.default, x, lead + d, places)
    return x


def _localize_backward(ctx: LocalContext, space: int) -> fx.Node:
    if not split_dims(ctx, space):
        return again(ctx)
    grad, shape = argument(ctx, "grad_output"), ctx.result_shape()
    lead = len(shape) - space
    given = global_tensor(ctx, "grad_output").shape
    for d, places in reversed(list(enumerate(_places(ctx, space)))):
        spans = (results_of(ctx, e, given[lead + e]) for e in range(d))
        before = [hi - lo for lo, hi in spans]
        sizes = [*shape[:lead], *before, *shape[lead + d :]]
        grad = scattered(ctx, grad, sizes, lead + d, (places, grad))
    return grad
