"""Resizing and edge padding: space is split by its results, which are weighted sums of places of the input.

A rank computes where its results lie in the whole input, and picks or mixes what it has read of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.layout.layout import Span
from passes.layout.windows import AntialiasResize, CubicResize, EdgePad, LinearResize, NearestResize
from passes.rules.core.assemble import again, argument, aten, positions
from passes.rules.core.rule import LocalContext, OpCall
from passes.rules.windowed.windowed import Site, Taps, mixed, mixed_back, windowed


def _pads(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[EdgePad]:
    """The op's padding is (before, after) of the last dim first."""
    before, reflects = call["padding"][::2][::-1], "reflection" in str(call.target)
    return [EdgePad(n, int(b), reflects) for n, b in zip(lengths, before, strict=True)]


def _edge_taps(site: Site[EdgePad], dim: int) -> Taps:
    """The position in this rank's input of each of its results."""
    ctx, pad = site.ctx, site.windows[dim]
    lo, hi = site.results(dim)
    at = positions(ctx, lo - pad.before, hi - pad.before)
    if pad.reflects:
        at = ctx.call(aten.rsub.Scalar, ctx.call(aten.abs.default, at), pad.length - 1)
        at = ctx.call(aten.rsub.Scalar, ctx.call(aten.abs.default, at), pad.length - 1)
    else:
        at = ctx.call(aten.clamp.default, at, 0, pad.length - 1)
    return Taps(hi - lo, 1, site.at_home(dim, at))


def _pad_edges(site: Site[EdgePad]) -> fx.Node:
    return mixed(site, argument(site.ctx, "self"), lambda d: _edge_taps(site, d))


def _pad_edges_backward(site: Site[EdgePad]) -> fx.Node:
    return mixed_back(site, argument(site.ctx, "grad_output"), lambda d: _edge_taps(site, d))


# ... *window(y) -> ... *y
edge_pad = windowed("x", "y", _pads, _pad_edges, linear="self")
# ... *y, ... *window(y) -> ... *window(y)
edge_pad_backward = windowed("yx", "x", _pads, _pad_edges_backward, linear="grad_output")


Resizing = NearestResize | LinearResize | CubicResize | AntialiasResize


@dataclass(frozen=True)
class _Part:
    """One dim on one rank. span: its results. held: what it has of the operand, of `length` in all. Places are of
    the whole operand, in float64."""

    ctx: LocalContext
    span: Span
    held: Span
    length: int

    def numbers(self, lo: int, hi: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        return positions(self.ctx, lo, hi, dtype=dtype)

    def add(self, x: fx.Node, y: fx.Node | float) -> fx.Node:
        return self.ctx.call(aten.add.Tensor, x, y)

    def mul(self, x: fx.Node, y: fx.Node | float) -> fx.Node:
        return self.ctx.call(aten.mul.Tensor, x, y)

    def column(self, x: fx.Node) -> fx.Node:
        return self.ctx.call(aten.unsqueeze.default, x, 1)

    def distances(self, at: fx.Node, places: fx.Node, unit: float = 1.0) -> fx.Node:
        apart = self.ctx.call(aten.abs.default, self.ctx.call(aten.sub.Tensor, at, places))
        return apart if unit == 1.0 else self.ctx.call(aten.div.Tensor, apart, unit)

    def middles(self, ratio: float) -> fx.Node:
        return self.mul(self.add(self.numbers(*self.span), 0.5), ratio)

    def taps(self, places: fx.Node, weights: fx.Node | None, count: int) -> Taps:
        """Places beyond the operand are its first or last; rounding that differs from `reads` costs nothing."""
        ctx, (first, last) = self.ctx, self.held
        places = ctx.call(aten._to_copy.default, places, dtype=torch.int64)
        places = ctx.call(aten.clamp.default, places, 0, self.length - 1)
        places = ctx.call(aten.clamp.default, self.add(places, -first), 0, last - first - 1)
        if weights is not None:
            weights = ctx.call(aten._to_copy.default, weights, dtype=node_value(ctx.node).dtype)
        places = ctx.call(aten.view.default, places, [-1])
        return Taps(self.span[1] - self.span[0], count, places, weights)


def resized_taps(site: Site[Resizing], dim: int) -> Taps:
    """Of this rank's results along a dim of space. Weights have the dtype of the op's result."""
    part, resizing = _Part(site.ctx, site.results(dim), site.reads(dim), site.lengths[dim]), site.windows[dim]
    if isinstance(resizing, NearestResize):
        return _nearest(part, resizing)
    if isinstance(resizing, LinearResize):
        return _linear(part, resizing)
    return _cubic(part, resizing) if isinstance(resizing, CubicResize) else _antialiased(part, resizing)


def _nearest(part: _Part, resizing: NearestResize) -> Taps:
    at = part.numbers(*part.span, torch.float64 if resizing.precise else torch.float32)
    at = part.mul(at if resizing.offset == 0.0 else part.add(at, resizing.offset), resizing.ratio)
    if resizing.precise:
        at = part.ctx.call(aten._to_copy.default, at, dtype=torch.float32)
    places = part.ctx.call(aten.floor.default, at)
    return part.taps(places, None, 1)


def _linear(part: _Part, resizing: LinearResize) -> Taps:
    at = _corners(part, resizing)
    if not resizing.align_corners:
        at = part.ctx.call(aten.clamp.default, at, 0.0)
    places, distances = _around(part, at, 0, 2)
    return part.taps(places, _triangle(part, distances), 2)


def _cubic(part: _Part, resizing: CubicResize) -> Taps:
    places, distances = _around(part, _corners(part, resizing), -1, 3)
    # The cubic filter's free number: of plain and of antialiased resizing. [torch: UpSample.h]
    return part.taps(places, _spline(part, distances, -0.75), 4)


def _corners(part: _Part, resizing: LinearResize | CubicResize) -> fx.Node:
    """Where each result lies."""
    if resizing.align_corners:
        return part.mul(part.numbers(*part.span), resizing.ratio)
    return part.add(part.middles(resizing.ratio), -0.5)


def _around(part: _Part, at: fx.Node, lo: int, hi: int) -> tuple[fx.Node, fx.Node]:
    """[results, hi - lo]: the places from `lo` to `hi` counted from the one at or below each, and how far they are."""
    below = part.column(part.ctx.call(aten.floor.default, at))
    places = part.add(below, part.numbers(lo, hi))
    return places, part.distances(part.column(at), places)


def _antialiased(part: _Part, resizing: AntialiasResize) -> Taps:
    ctx = part.ctx
    middle = part.middles(resizing.ratio)
    start = part.add(part.add(middle, -resizing.support), 0.5)
    start = ctx.call(aten.clamp.default, ctx.call(aten.floor.default, start), 0.0)
    places = part.add(part.column(start), part.numbers(0, resizing.widest))
    distances = part.distances(part.column(part.add(middle, -0.5)), places, resizing.stretch)
    weights = _triangle(part, distances) if resizing.radius == 1 else _spline(part, distances, -0.5)
    there = ctx.call(aten.lt.Scalar, places, part.length)
    weights = part.mul(weights, ctx.call(aten._to_copy.default, there, dtype=torch.float64))
    total = ctx.call(aten.sum.dim_IntList, weights, [1], True)
    return part.taps(places, ctx.call(aten.div.Tensor, weights, total), resizing.widest)


def _triangle(part: _Part, distances: fx.Node) -> fx.Node:
    return part.ctx.call(aten.clamp.default, part.ctx.call(aten.rsub.Scalar, distances, 1.0), 0.0)


def _spline(part: _Part, x: fx.Node, a: float) -> fx.Node:
    """The cubic convolution filter: (a+2) x^3 - (a+3) x^2 + 1 up to 1, a (x^3 - 5 x^2 + 8 x - 4) up to 2, then 0."""
    ctx = part.ctx
    inner = part.add(part.mul(x, a + 2), -(a + 3))
    inner = part.add(part.mul(part.mul(inner, x), x), 1.0)
    outer = part.add(part.mul(part.add(part.mul(part.add(x, -5.0), x), 8.0), x), -4.0)
    outer = part.mul(
        part.mul(outer, a), ctx.call(aten._to_copy.default, _below(part, x, 2.0), dtype=torch.float64)
    )
    return ctx.call(aten.where.self, _below(part, x, 1.0), inner, outer)


def _below(part: _Part, x: fx.Node, limit: float) -> fx.Node:
    return part.ctx.call(aten.lt.Scalar, x, limit)


def _forward_windows(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[Resizing]:
    return _resizings(call, lengths, counts, _is_precise(call.result.dtype, counts))


def _backward_windows(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[Resizing]:
    return _resizings(call, lengths, counts, False)


def _resizings(call: OpCall, lengths: Sequence[int], counts: Sequence[int], precise: bool) -> list[Resizing]:
    """One per dim of space, from the op's name and its arguments. precise: see `NearestResize`."""
    name = str(call.target)
    # Results per operand position that the caller named; None: the quotient of the sizes counts.
    names = ("scales",) if len(lengths) == 1 else ("scales_d", "scales_h", "scales_w")[-len(lengths) :]
    each = zip(lengths, counts, (call[scale] for scale in names), strict=True)
    if "align_corners" not in call.arguments:
        offset = 0.5 if "nearest_exact" in name else 0.0
        return [NearestResize(n, _nearest_ratio(n, m, scale), precise, offset) for n, m, scale in each]
    corners = bool(call["align_corners"])
    ratios = [(n, _ratio(n, m, scale, corners)) for n, m, scale in each]
    if "_aa" in name:
        return [AntialiasResize(n, ratio, 2 if "cubic" in name else 1) for n, ratio in ratios]
    make = CubicResize if "cubic" in name else LinearResize
    return [make(n, ratio, corners) for n, ratio in ratios]


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
    return _nearest_ratio(length, results, scale)


def _localize(site: Site[Resizing]) -> fx.Node:
    return mixed(site, site.ctx.args[0], lambda d: resized_taps(site, d))


def _localize_backward(site: Site[Resizing]) -> fx.Node:
    return mixed_back(site, site.ctx.args[0], lambda d: resized_taps(site, d))


def _unsplit_backward(ctx: LocalContext) -> fx.Node:
    return again(ctx, input_size=ctx.result_shape())


# ... *window(y) -> ... *y
resize = windowed("x", "y", _forward_windows, _localize, linear="self")
# ... *y -> ... *window(y)
resize_backward = windowed(
    "y", "x", _backward_windows, _localize_backward, linear="grad_output", unsplit=_unsplit_backward
)
