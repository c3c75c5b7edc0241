"""Adaptive average and max pooling: batch and channels pass; space is split by its results.

Where all results read equally much, a rank runs the op on what its results read. Elsewhere the windows of a part are
not those that the op would choose for a tensor of its size: averages are then weighted sums (`Taps`), and for maxima
each result's positions are laid side by side, equally many, so that the op finds them there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from torch import fx

from passes.ir.joint import node_value
from passes.layout.windows import AdaptiveWindow
from passes.rules.core.emit_op import again, argument, aten, positions
from passes.rules.core.opcall import OpCall
from passes.rules.windowed.taps import Taps, mixed, mixed_back
from passes.rules.windowed.windowed import Site, windowed
from passes.rules.windowed.windows_in_space import relocated

__all__ = [
    "adaptive_average",
    "adaptive_average_backward",
    "adaptive_max",
    "adaptive_max_backward",
]


_Pool = Site[AdaptiveWindow]


def _windows(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[AdaptiveWindow]:
    return [AdaptiveWindow(*each) for each in zip(lengths, counts, strict=True)]


def _is_even(site: _Pool) -> bool:
    """Whether the op may be run on what this rank's results read."""
    return all(site.windows[d].is_even for d in site.split)


def _positions(site: _Pool, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """[results, widest]: positions in the whole input from each window's first on. [results, 1]: where the window of
    each result begins and ends there."""
    window, ctx = site.windows[dim], site.ctx
    at = ctx.call(aten.unsqueeze.default, positions(ctx, *site.results(dim)), 1)
    at = ctx.call(aten.mul.Tensor, at, window.length)
    beyond = ctx.call(aten.add.Tensor, at, window.length + window.results - 1)
    start, end = (
        ctx.call(aten.div.Tensor_mode, n, window.results, rounding_mode="floor") for n in (at, beyond)
    )
    return ctx.call(aten.add.Tensor, start, positions(ctx, 0, window.widest)), start, end


def _inside(site: _Pool, at: fx.Node, end: fx.Node, dim: int) -> fx.Node:
    """Flat: each position, that of the window's last one where it is beyond, as one of this rank's input."""
    ctx = site.ctx
    at = ctx.call(aten.minimum.default, at, ctx.call(aten.sub.Tensor, end, 1))
    at = ctx.call(aten.sub.Tensor, at, site.reads(dim)[0])
    return ctx.call(aten.view.default, at, [-1])


def _taps(site: _Pool, dim: int) -> Taps:
    """The average of each result of `dim`."""
    ctx = site.ctx
    at, start, end = _positions(site, dim)
    counts = ctx.call(aten.lt.Tensor, at, end)
    one = ctx.call(aten._to_copy.default, counts, dtype=node_value(ctx.node).dtype)
    weights = ctx.call(aten.div.Tensor, one, ctx.call(aten.sub.Tensor, end, start))
    count = site.result_lengths[dim]
    return Taps(count, site.windows[dim].widest, _inside(site, at, end, dim), weights)


def _average(site: _Pool) -> fx.Node:
    if _is_even(site):
        return again(site.ctx, output_size=site.result_lengths)
    return mixed(site, argument(site.ctx, "self"), lambda d: _taps(site, d))


def _average_backward(site: _Pool) -> fx.Node:
    if _is_even(site):
        return again(site.ctx)
    return mixed_back(site, argument(site.ctx, "grad_output"), lambda d: _taps(site, d))


def _max(site: _Pool) -> tuple[fx.Node, fx.Node]:
    ctx = site.ctx
    x, lengths = argument(ctx, "self"), site.input_lengths
    laid: dict[int, fx.Node] = {}  # dim -> this rank's position of each of those laid side by side
    for d in site.split:
        if not site.windows[d].is_even:
            at, _, end = _positions(site, d)
            laid[d] = _inside(site, at, end, d)
            x = ctx.call(aten.index_select.default, x, site.lead + d, laid[d])
            lengths[d] = site.result_lengths[d] * site.windows[d].widest
    found = again(ctx, self=x, output_size=site.result_lengths)
    values, index = (ctx.call(operator.getitem, found, i) for i in range(2))

    def whole(dim: int, at: fx.Node) -> fx.Node:
        if dim in laid:
            at = ctx.call(aten.index.Tensor, laid[dim], [at])
        first = site.reads(dim)[0]
        return ctx.call(aten.add.Tensor, at, first) if first else at

    return values, relocated(ctx, index, lengths, site.lengths, whole)


def _max_backward(site: _Pool) -> fx.Node:
    """Every result's gradient is added where its maximum is."""
    ctx, shape = site.ctx, site.ctx.result_shape()
    lead = shape[: site.lead]

    def own(dim: int, at: fx.Node) -> fx.Node:
        first = site.reads(dim)[0]
        return ctx.call(aten.sub.Tensor, at, first) if first else at

    index = relocated(ctx, argument(ctx, "indices"), site.lengths, site.input_lengths, own)
    grad = argument(ctx, "grad_output")
    flat = [[*lead, math.prod(lengths)] for lengths in (site.input_lengths, site.result_lengths)]
    zeros = ctx.call(aten.new_zeros.default, grad, flat[0])
    index, grad = (ctx.call(aten.reshape.default, t, flat[1]) for t in (index, grad))
    total = ctx.call(aten.scatter_add.default, zeros, len(lead), index, grad)
    return ctx.call(aten.view.default, total, shape)


# ... *window(y) -> ... *y
adaptive_average = windowed("x", "y", _windows, _average, linear="self")
# ... *y, ... *window(y) -> ... *window(y)
adaptive_average_backward = windowed("yx", "x", _windows, _average_backward, linear="grad_output")
# ... *window(y) -> ... *y, ... *y; indices are places in the whole input.
adaptive_max = windowed("x", "yy", _windows, _max)
# ... *y, ... *window(y), ... *y -> ... *window(y)
adaptive_max_backward = windowed("yxy", "x", _windows, _max_backward, linear="grad_output")
