"""Pooling: batch and channels pass; space is split by its results, which read a window of the input.

Gradients are the transposed windows: each rank finds a summand of what its results read. Adaptive pooling runs the op
on what a rank's results read where all read equally much. Elsewhere the windows of a part are not those that the op
would choose for a tensor of its size: averages are then weighted sums (`Taps`), and for maxima each result's positions
are laid side by side, equally many, so that the op finds them there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.ir.joint import node_value
from passes.layout.windows import AdaptiveWindow, SlidingWindow
from passes.rules.core.assemble import again, argument, aten, positions
from passes.rules.core.rule import OpCall
from passes.rules.windowed.windowed import (
    Site,
    Taps,
    mixed,
    mixed_back,
    pad_space,
    relocated,
    unpad_space,
    windowed,
    windows_of,
)

_Pool = Site[SlidingWindow]


def _windows(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[SlidingWindow]:
    kernel, dilation = call["kernel_size"], call.arguments.get("dilation", 1)
    return windows_of(SlidingWindow, lengths, kernel, call["stride"] or kernel, dilation, call["padding"])


def _arguments(site: _Pool, **changes: Any) -> dict[str, Any]:
    """Those of the op that say where it pads: dims that are split are padded here and not by the op."""
    padding = [0 if d in site.split else w.before for d, w in enumerate(site.windows)]
    stride = [w.stride for w in site.windows]
    return {"stride": stride, "padding": padding, "ceil_mode": False, **changes}


def _sides(site: _Pool) -> list[tuple[int, int]]:
    """Per dim of space what to pad the input with."""
    return [
        window.padding(*site.results(d)) if d in site.split else (0, _beyond(window, site.counts[d]))
        for d, window in enumerate(site.windows)
    ]


def _beyond(window: SlidingWindow, count: int) -> int:
    """What `ceil_mode` needs behind a dim that is not split, beyond the padding that the op does."""
    _, end = window.reach(0, count)
    return max(0, end - window.length - window.before)


def _padded(site: _Pool, fill: float) -> fx.Node:
    return pad_space(site.ctx, argument(site.ctx, "self"), _sides(site), fill)


def _gradient(site: _Pool, **changes: Any) -> fx.Node:
    """The backward op on the padded input's shape; of its result, what is of the input."""
    sides = _sides(site)
    shape = site.empty_padded(argument(site.ctx, "self"), sides)
    return unpad_space(site.ctx, again(site.ctx, self=shape, **_arguments(site, **changes)), sides)


def _moved(site: _Pool, index: fx.Node, sign: int) -> fx.Node:
    """Places in this rank's padded input as places in the whole one (sign 1), or the other way (-1)."""
    padded = [n + sum(side) for n, side in zip(site.input_lengths, _sides(site), strict=True)]
    lengths, onto = (padded, site.lengths)[::sign]

    def shifted(dim: int, at: fx.Node) -> fx.Node:
        first = site.windows[dim].reach(*site.results(dim))[0] if dim in site.split else 0
        if not first:
            return at
        at = site.ctx.call(aten.add.Tensor, at, sign * first)
        return site.ctx.call(aten.clamp.default, at, 0, onto[dim] - 1)

    return relocated(site.ctx, index, lengths, onto, shifted)


def _scaled(site: _Pool, x: fx.Node) -> fx.Node:
    """`x`, of the output's shape, divided by what each average is over."""
    override = argument(site.ctx, "divisor_override")
    if override is not None:
        return site.ctx.call(aten.div.Tensor, x, float(override))
    for d in range(len(site.windows)):
        x = site.ctx.call(aten.div.Tensor, x, _counts(site, d))
    return x


def _counts(site: _Pool, dim: int) -> fx.Node:
    """[results, 1, ...]: positions of one dim in each window; what is padded counts if the op says so.

    Dividing by integers keeps the dtype of what is averaged.
    """
    window, ctx = site.windows[dim], site.ctx
    lo, hi = (at * window.stride - window.before for at in site.results(dim))
    start = positions(ctx, lo, hi, window.stride)
    padding = window.before if argument(ctx, "count_include_pad") else 0
    end = ctx.call(aten.add.Tensor, start, window.kernel)
    end = ctx.call(aten.clamp.default, end, None, window.length + padding)
    begin = start if padding else ctx.call(aten.clamp.default, start, 0)
    count = ctx.call(aten.sub.Tensor, end, begin)
    return ctx.call(aten.view.default, count, [-1, *[1] * (len(site.windows) - 1 - dim)])


def _max_pool(site: _Pool) -> tuple[fx.Node, fx.Node]:
    # The least value is never chosen where there is any other.
    found = again(site.ctx, self=_padded(site, float("-inf")), **_arguments(site))
    values, index = (site.ctx.call(operator.getitem, found, i) for i in range(2))
    return values, _moved(site, index, 1)


def _max_pool_backward(site: _Pool) -> fx.Node:
    return _gradient(site, indices=_moved(site, argument(site.ctx, "indices"), -1))


_SUMMED = {"count_include_pad": True, "divisor_override": 1}


def _average_pool(site: _Pool) -> fx.Node:
    return _scaled(site, again(site.ctx, self=_padded(site, 0.0), **_arguments(site, **_SUMMED)))


def _average_pool_backward(site: _Pool) -> fx.Node:
    return _gradient(site, grad_output=_scaled(site, argument(site.ctx, "grad_output")), **_SUMMED)


# ... *window(y) -> ... *y, ... *y; indices are places in the whole input.
max_pool = windowed("x", "yy", _windows, _max_pool)
# ... *y, ... *window(y), ... *y -> ... *window(y)
max_pool_backward = windowed("yxy", "x", _windows, _max_pool_backward, linear="grad_output")
# ... *window(y) -> ... *y
average_pool = windowed("x", "y", _windows, _average_pool, linear="self")
# ... *y, ... *window(y) -> ... *window(y)
average_pool_backward = windowed("yx", "x", _windows, _average_pool_backward, linear="grad_output")


_Adaptive = Site[AdaptiveWindow]


def _adaptive_windows(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[AdaptiveWindow]:
    return windows_of(AdaptiveWindow, lengths, counts)


def _is_even(site: _Adaptive) -> bool:
    """Whether the op may be run on what this rank's results read."""
    return all(site.windows[d].is_even for d in site.split)


def _positions(site: _Adaptive, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
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


def _inside(site: _Adaptive, at: fx.Node, end: fx.Node, dim: int) -> fx.Node:
    """Flat: each position, that of the window's last one where it is beyond, as one of this rank's input."""
    ctx = site.ctx
    at = ctx.call(aten.minimum.default, at, ctx.call(aten.sub.Tensor, end, 1))
    return ctx.call(aten.view.default, site.at_home(dim, at), [-1])


def _taps(site: _Adaptive, dim: int) -> Taps:
    """The average of each result of `dim`."""
    ctx = site.ctx
    at, start, end = _positions(site, dim)
    counts = ctx.call(aten.lt.Tensor, at, end)
    one = ctx.call(aten._to_copy.default, counts, dtype=node_value(ctx.node).dtype)
    weights = ctx.call(aten.div.Tensor, one, ctx.call(aten.sub.Tensor, end, start))
    count = site.result_lengths[dim]
    return Taps(count, site.windows[dim].widest, _inside(site, at, end, dim), weights)


def _adaptive_average(site: _Adaptive) -> fx.Node:
    if _is_even(site):
        return again(site.ctx, output_size=site.result_lengths)
    return mixed(site, argument(site.ctx, "self"), lambda d: _taps(site, d))


def _adaptive_average_backward(site: _Adaptive) -> fx.Node:
    if _is_even(site):
        return again(site.ctx)
    return mixed_back(site, argument(site.ctx, "grad_output"), lambda d: _taps(site, d))


def _adaptive_max(site: _Adaptive) -> tuple[fx.Node, fx.Node]:
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
        return site.at_home(dim, at, 1)

    return values, relocated(ctx, index, lengths, site.lengths, whole)


def _adaptive_max_backward(site: _Adaptive) -> fx.Node:
    """Every result's gradient is added where its maximum is."""
    ctx, shape = site.ctx, site.ctx.result_shape()
    lead = shape[: site.lead]
    index = relocated(ctx, argument(ctx, "indices"), site.lengths, site.input_lengths, site.at_home)
    grad = argument(ctx, "grad_output")
    flat = [[*lead, math.prod(lengths)] for lengths in (site.input_lengths, site.result_lengths)]
    zeros = ctx.call(aten.new_zeros.default, grad, flat[0])
    index, grad = (ctx.call(aten.reshape.default, t, flat[1]) for t in (index, grad))
    total = ctx.call(aten.scatter_add.default, zeros, len(lead), index, grad)
    return ctx.call(aten.view.default, total, shape)


# ... *window(y) -> ... *y
adaptive_average = windowed("x", "y", _adaptive_windows, _adaptive_average, linear="self")
# ... *y, ... *window(y) -> ... *window(y)
adaptive_average_backward = windowed(
    "yx", "x", _adaptive_windows, _adaptive_average_backward, linear="grad_output"
)
# ... *window(y) -> ... *y, ... *y; indices are places in the whole input.
adaptive_max = windowed("x", "yy", _adaptive_windows, _adaptive_max)
# ... *y, ... *window(y), ... *y -> ... *window(y)
adaptive_max_backward = windowed("yxy", "x", _adaptive_windows, _adaptive_max_backward, linear="grad_output")
