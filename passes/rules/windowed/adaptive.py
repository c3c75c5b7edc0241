"""Adaptive average and max pooling: batch and channels pass; space is split by its results.

Where all results read equally much, a rank runs the op on what its results read. Elsewhere the windows of a part are
not those that the op would choose for a tensor of its size: averages are then weighted sums (`Taps`), and for maxima
each result's positions are laid side by side, equally many, so that the op finds them there.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.layout.windows import AdaptiveWindow
from passes.rules.core.emit_op import again, argument, aten, global_tensor
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import LocalContext
from passes.rules.windowed.taps import Taps, mixed, mixed_back
from passes.rules.windowed.windowed import pooling
from passes.rules.windowed.windows_in_space import relocated, results_of, split_dims

__all__ = [
    "adaptive_average",
    "adaptive_average_backward",
    "adaptive_max",
    "adaptive_max_backward",
]


def adaptive_average(space: int) -> Builder:
    """... *window(y) -> ... *y"""
    return pooling(space, "x", "y", _windows_of, _average, linear="self")


def adaptive_average_backward(space: int) -> Builder:
    """... *y, ... *window(y) -> ... *window(y)"""
    return pooling(space, "yx", "x", _windows_of, _average_backward, linear="grad_output")


def adaptive_max(space: int) -> Builder:
    """... *window(y) -> ... *y, ... *y; indices are places in the whole input."""
    return pooling(space, "x", "yy", _windows_of, _max)


def adaptive_max_backward(space: int) -> Builder:
    """... *y, ... *window(y), ... *y -> ... *window(y)"""
    return pooling(space, "yxy", "x", _windows_of, _max_backward, linear="grad_output")


def _windows_of(call: OpCall, space: int) -> tuple[AdaptiveWindow, ...]:
    output = call.tensor("grad_output") if "grad_output" in call.arguments else call.result
    return _windows(call.tensor("self").shape[-space:], output.shape[-space:])


def _windows(lengths: tuple[int, ...], results: tuple[int, ...]) -> tuple[AdaptiveWindow, ...]:
    return tuple(AdaptiveWindow(n, m) for n, m in zip(lengths, results, strict=True))


@dataclass(frozen=True)
class _Site:
    """An adaptive pooling op on one rank. split: the dims of space that are. shape: the global input's."""

    ctx: LocalContext
    shape: tuple[int, ...]
    windows: tuple[AdaptiveWindow, ...]
    split: tuple[int, ...]

    @staticmethod
    def of(ctx: LocalContext, output: torch.Tensor) -> _Site:
        space = 3 if "3d" in str(ctx.node.target) else 2
        shape = tuple(global_tensor(ctx, "self").shape)
        windows = _windows(shape[-space:], tuple(output.shape[-space:]))
        return _Site(ctx, shape, windows, split_dims(ctx, space))

    @property
    def lead(self) -> int:
        return len(self.shape) - len(self.windows)

    @property
    def is_even(self) -> bool:
        """Whether the op may be run on what this rank's results read."""
        return all(self.windows[d].is_even for d in self.split)

    def results(self, dim: int) -> tuple[int, int]:
        return results_of(self.ctx, dim, self.windows[dim].results)

    def reads(self, dim: int) -> tuple[int, int]:
        return self.windows[dim].reads(*self.results(dim))

    @property
    def result_lengths(self) -> list[int]:
        return [hi - lo for lo, hi in map(self.results, range(len(self.windows)))]

    @property
    def input_lengths(self) -> list[int]:
        return [hi - lo for lo, hi in map(self.reads, range(len(self.windows)))]

    def bounds(self, dim: int) -> tuple[fx.Node, fx.Node]:
        """[results, 1]: where the window of each result begins and ends in the whole input."""
        window, ctx = self.windows[dim], self.ctx
        places = {"dtype": torch.int64, "device": node_value(ctx.node).device, "pin_memory": False}
        at = ctx.call(aten.arange.start_step, *self.results(dim), 1, **places)
        at = ctx.call(aten.mul.Tensor, ctx.call(aten.unsqueeze.default, at, 1), window.length)
        beyond = ctx.call(aten.add.Tensor, at, window.length + window.results - 1)
        start, end = (
            ctx.call(aten.div.Tensor_mode, n, window.results, rounding_mode="floor") for n in (at, beyond)
        )
        return start, end

    def positions(self, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """[results, widest]: positions in the whole input from each window's first on; and the `bounds`."""
        ctx = self.ctx
        start, end = self.bounds(dim)
        places = {"dtype": torch.int64, "device": node_value(ctx.node).device, "pin_memory": False}
        step = ctx.call(aten.arange.start_step, 0, self.windows[dim].widest, 1, **places)
        return ctx.call(aten.add.Tensor, start, step), start, end

    def inside(self, positions: fx.Node, end: fx.Node, dim: int) -> fx.Node:
        """Flat: each position, that of the window's last one where it is beyond, as one of this rank's input."""
        last = self.ctx.call(aten.sub.Tensor, end, 1)
        at = self.ctx.call(aten.minimum.default, positions, last)
        at = self.ctx.call(aten.sub.Tensor, at, self.reads(dim)[0])
        return self.ctx.call(aten.view.default, at, [-1])

    def taps(self, dim: int, like: torch.Tensor) -> Taps:
        """The average of each result of `dim`."""
        ctx = self.ctx
        at, start, end = self.positions(dim)
        counts = ctx.call(aten.lt.Tensor, at, end)
        one = ctx.call(aten._to_copy.default, counts, dtype=like.dtype)
        weights = ctx.call(aten.div.Tensor, one, ctx.call(aten.sub.Tensor, end, start))
        lo, hi = self.results(dim)
        return Taps(hi - lo, self.windows[dim].widest, self.inside(at, end, dim), weights)


def _average(ctx: LocalContext) -> fx.Node:
    like = node_value(ctx.node)
    site = _Site.of(ctx, like)
    if site.is_even:
        return again(ctx, output_size=site.result_lengths)
    x, shape = argument(ctx, "self"), _local_input(ctx, site)
    for d in range(len(site.windows)):
        x = mixed(ctx, x, shape, site.lead + d, site.taps(d, like))
        shape[site.lead + d] = site.result_lengths[d]
    return x


def _local_input(ctx: LocalContext, site: _Site) -> list[int]:
    """This rank's shape of the input, in the forward."""
    return [*ctx.result_shape()[: site.lead], *site.input_lengths]


def _average_backward(ctx: LocalContext) -> fx.Node:
    site = _Site.of(ctx, global_tensor(ctx, "grad_output"))
    if site.is_even:
        return again(ctx)
    grad, shape, like = argument(ctx, "grad_output"), ctx.result_shape(), node_value(ctx.node)
    for d in reversed(range(len(site.windows))):
        before = [*shape[: site.lead], *site.result_lengths[:d], *shape[site.lead + d :]]
        grad = mixed_back(ctx, grad, before, site.lead + d, site.taps(d, like))
    return grad


def _max(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    site = _Site.of(ctx, node_value(ctx.node, 0))
    if not site.split:
        return again(ctx)
    x, lengths = argument(ctx, "self"), site.input_lengths
    laid: dict[int, fx.Node] = {}  # dim -> this rank's position of each of those laid side by side
    for d in site.split:
        if not site.windows[d].is_even:
            at, _, end = site.positions(d)
            laid[d] = site.inside(at, end, d)
            x = ctx.call(aten.index_select.default, x, site.lead + d, laid[d])
            lengths[d] = site.result_lengths[d] * site.windows[d].widest
    found = again(ctx, self=x, output_size=site.result_lengths)
    values, index = (ctx.call(operator.getitem, found, i) for i in range(2))

    def whole(dim: int, at: fx.Node) -> fx.Node:
        if dim in laid:
            at = ctx.call(aten.index.Tensor, laid[dim], [at])
        first = site.reads(dim)[0]
        return ctx.call(aten.add.Tensor, at, first) if first else at

    return values, relocated(ctx, index, lengths, site.shape[site.lead :], whole)


def _max_backward(ctx: LocalContext) -> fx.Node:
    """Every result's gradient is added where its maximum is."""
    site = _Site.of(ctx, global_tensor(ctx, "grad_output"))
    if not site.split:
        return again(ctx)
    shape = ctx.result_shape()
    lead = shape[: site.lead]

    def own(dim: int, at: fx.Node) -> fx.Node:
        first = site.reads(dim)[0]
        return ctx.call(aten.sub.Tensor, at, first) if first else at

    index = relocated(ctx, argument(ctx, "indices"), site.shape[site.lead :], site.input_lengths, own)
    grad = argument(ctx, "grad_output")
    flat = [[*lead, math.prod(lengths)] for lengths in (site.input_lengths, site.result_lengths)]
    zeros = ctx.call(aten.new_zeros.default, grad, flat[0])
    index, grad = (ctx.call(aten.reshape.default, t, flat[1]) for t in (index, grad))
    total = ctx.call(aten.scatter_add.default, zeros, len(lead), index, grad)
    return ctx.call(aten.view.default, total, shape)
