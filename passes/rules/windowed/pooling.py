"""Max and average pooling: batch and channels pass; space is split by its results, which read a window of the input.

Gradients are the transposed windows: each rank finds a summand of what its results read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.ir.joint import node_value
from passes.layout.windows import SlidingWindow
from passes.rules.core.emit_op import again, argument, aten
from passes.rules.core.opcall import Builder, OpCall, describe
from passes.rules.core.rule import LocalContext
from passes.rules.windowed.windowed import pooling
from passes.rules.windowed.windows_in_space import pad_space, per_dim, relocated, results_of, split_dims

__all__ = ["average_pool", "average_pool_backward", "max_pool", "max_pool_backward"]


def max_pool(space: int) -> Builder:
    """... *window(y) -> ... *y, ... *y; indices are places in the whole input."""
    return pooling(space, "x", "yy", _windows, _max_pool)


def max_pool_backward(space: int) -> Builder:
    """... *y, ... *window(y), ... *y -> ... *window(y)"""
    return pooling(space, "yxy", "x", _windows, _max_pool_backward, linear="grad_output")


def average_pool(space: int) -> Builder:
    """... *window(y) -> ... *y"""
    return pooling(space, "x", "y", _windows, _average_pool, linear=_INPUT)


def average_pool_backward(space: int) -> Builder:
    """... *y, ... *window(y) -> ... *window(y)"""
    return pooling(space, "yx", "x", _windows, _average_pool_backward, linear="grad_output")


_INPUT = "self"


def _windows(call: OpCall, space: int) -> tuple[SlidingWindow, ...]:
    """One per dim of space."""
    lengths = call.tensor(_INPUT).shape[-space:]
    kernel = per_dim(call["kernel_size"], space)
    stride = per_dim(call["stride"] or kernel, space)
    dilation = per_dim(call["dilation"], space) if "dilation" in call.arguments else [1] * space
    padding = per_dim(call["padding"], space)
    return tuple(
        SlidingWindow(*numbers) for numbers in zip(lengths, kernel, stride, dilation, padding, strict=True)
    )


@dataclass(frozen=True)
class _Site:
    """A pooling op on one rank. split: the dims of space that are; these are padded here and not by the op.
    counts: results along each dim of space, in all."""

    ctx: LocalContext
    lead: int
    lengths: tuple[int, ...]
    windows: tuple[SlidingWindow, ...]
    split: tuple[int, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(ctx: LocalContext, space: int) -> _Site:
        call = describe(ctx.node)
        shape = call.tensor(_INPUT).shape
        lead = len(shape) - space
        output = call.tensor("grad_output") if "grad_output" in call.arguments else call.result
        return _Site(
            ctx, lead, shape[lead:], _windows(call, space), split_dims(ctx, space), output.shape[lead:]
        )

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Those of the op that say where it pads."""
        padding = [0 if d in self.split else w.before for d, w in enumerate(self.windows)]
        stride = [w.stride for w in self.windows]
        return {"stride": stride, "padding": padding, "ceil_mode": False, **changes}

    def padded(self, fill: float) -> fx.Node:
        sides = [self._padding(d) for d in range(len(self.windows))]
        return pad_space(self.ctx, argument(self.ctx, _INPUT), sides, fill)

    def padded_shape(self) -> fx.Node:
        """A tensor of the shape of `padded`, for an op that reads no more of it."""
        shape = [*self.ctx.result_shape()[: self.lead], *self.local_lengths()]
        return self.ctx.call(aten.new_empty.default, argument(self.ctx, _INPUT), shape)

    def unpadded(self, gradient: fx.Node) -> fx.Node:
        """Of the gradient of `padded`, that of the input."""
        for d in range(len(self.windows)):
            before, _ = self._padding(d)
            lo, hi = self._reads(d)
            gradient = self.ctx.call(aten.slice.Tensor, gradient, self.lead + d, before, before + hi - lo)
        return gradient

    def _results(self, dim: int) -> tuple[int, int]:
        return results_of(self.ctx, dim, self.counts[dim])

    def _reads(self, dim: int) -> tuple[int, int]:
        return self.windows[dim].reads(*self._results(dim)) if dim in self.split else (0, self.lengths[dim])

    def _padding(self, dim: int) -> tuple[int, int]:
        if dim in self.split:
            return self.windows[dim].padding(*self._results(dim))
        return 0, self._beyond(dim)

    def _beyond(self, dim: int) -> int:
        """What `ceil_mode` needs behind a dim that is not split, beyond the padding that the op does."""
        window = self.windows[dim]
        _, end = window.reach(0, self.counts[dim])
        return max(0, end - self.lengths[dim] - window.before)

    def first(self, dim: int) -> int:
        """Where, in the whole input, the padded one of this rank begins."""
        return self.windows[dim].reach(*self._results(dim))[0] if dim in self.split else 0

    def local_lengths(self) -> list[int]:
        """Of the padded input."""
        sides = [self._padding(d) for d in range(len(self.windows))]
        spans = [self._reads(d) for d in range(len(self.windows))]
        return [hi - lo + before + after for (lo, hi), (before, after) in zip(spans, sides, strict=True)]

    def moved(self, index: fx.Node, lengths: Sequence[int], onto: Sequence[int], sign: int) -> fx.Node:
        """Places in an array of `lengths` as places in one of `onto`, shifted by sign * `first` in every dim."""

        def shifted(dim: int, at: fx.Node) -> fx.Node:
            if not self.first(dim):
                return at
            at = self.ctx.call(aten.add.Tensor, at, sign * self.first(dim))
            return self.ctx.call(aten.clamp.default, at, 0, onto[dim] - 1)

        return relocated(self.ctx, index, lengths, onto, shifted)

    def scaled(self, x: fx.Node) -> fx.Node:
        """`x`, of the output's shape, divided by what each average is over."""
        override = argument(self.ctx, "divisor_override")
        if override is not None:
            return self.ctx.call(aten.div.Tensor, x, float(override))
        for d in range(len(self.windows)):
            x = self.ctx.call(aten.div.Tensor, x, self._counts(d))
        return x

    def _counts(self, dim: int) -> fx.Node:
        """[results, 1, ...]: positions of one dim in each window; what is padded counts if the op says so."""
        window, ctx = self.windows[dim], self.ctx
        lo, hi = self._results(dim)
        like = node_value(ctx.node)
        start = ctx.call(
            aten.arange.start_step,
            lo * window.stride - window.before,
            hi * window.stride - window.before,
            window.stride,
            dtype=torch.int64,  # positions; dividing by integers keeps the dtype of what is averaged
            device=like.device,
            pin_memory=False,
        )
        padding = window.before if argument(ctx, "count_include_pad") else 0
        end = ctx.call(aten.add.Tensor, start, window.kernel)
        end = ctx.call(aten.clamp.default, end, None, self.lengths[dim] + padding)
        begin = start if padding else ctx.call(aten.clamp.default, start, 0)
        count = ctx.call(aten.sub.Tensor, end, begin)
        return ctx.call(aten.view.default, count, [-1, *[1] * (len(self.windows) - 1 - dim)])


def _space_of(ctx: LocalContext) -> int:
    """Dims that the op pools: its name says so."""
    return 3 if "3d" in str(ctx.node.target) else 2


def _max_pool(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    site = _Site.of(ctx, _space_of(ctx))
    if not site.split:
        return again(ctx)
    # The least value is never chosen where there is any other.
    found = again(ctx, **{_INPUT: site.padded(float("-inf"))}, **site.arguments())
    values, index = (ctx.call(operator.getitem, found, i) for i in range(2))
    return values, site.moved(index, site.local_lengths(), site.lengths, 1)


def _max_pool_backward(ctx: LocalContext) -> fx.Node:
    site = _Site.of(ctx, _space_of(ctx))
    if not site.split:
        return again(ctx)
    index = site.moved(argument(ctx, "indices"), site.lengths, site.local_lengths(), -1)
    changes = site.arguments(indices=index)
    return site.unpadded(again(ctx, **{_INPUT: site.padded_shape()}, **changes))


def _average_pool(ctx: LocalContext) -> fx.Node:
    site = _Site.of(ctx, _space_of(ctx))
    if not site.split:
        return again(ctx)
    changes = site.arguments(count_include_pad=True, divisor_override=1)
    return site.scaled(again(ctx, **{_INPUT: site.padded(0.0)}, **changes))


def _average_pool_backward(ctx: LocalContext) -> fx.Node:
    site = _Site.of(ctx, _space_of(ctx))
    if not site.split:
        return again(ctx)
    grad = site.scaled(argument(ctx, "grad_output"))
    changes = site.arguments(grad_output=grad, count_include_pad=True, divisor_override=1)
    return site.unpadded(again(ctx, **{_INPUT: site.padded_shape()}, **changes))
