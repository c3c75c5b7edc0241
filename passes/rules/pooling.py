"""Max and average pooling: batch and channels pass; space is split by its results, which read a window of the input.

Gradients are the transposed windows: each rank finds a summand of what its results read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.joint import node_value
from passes.rules.assemble import assemble
from passes.rules.emit import again, argument, aten, global_tensor
from passes.rules.empty import empty_safe
from passes.rules.opcall import Builder, OpCall
from passes.rules.pointwise import linear_sets
from passes.rules.rule import LocalContext, Localize, OpRule
from passes.rules.space import per_dim, results_of, space_dims, split_dims
from passes.windows import SlidingWindow

__all__ = ["average_pool", "average_pool_backward", "max_pool", "max_pool_backward"]


def max_pool(space: int) -> Builder:
    """... *window(y) -> ... *y, ... *y; indices are places in the whole input."""
    return _pooling(space, operands="x", results="yy", localize=_max_pool)


def max_pool_backward(space: int) -> Builder:
    """... *y, ... *window(y), ... *y -> ... *window(y)"""
    return _pooling(space, operands="yxy", results="x", localize=_max_pool_backward, linear="grad_output")


def average_pool(space: int) -> Builder:
    """... *window(y) -> ... *y"""
    return _pooling(space, operands="x", results="y", localize=_average_pool, linear=_INPUT)


def average_pool_backward(space: int) -> Builder:
    """... *y, ... *window(y) -> ... *window(y)"""
    return _pooling(space, operands="yx", results="x", localize=_average_pool_backward, linear="grad_output")


_INPUT = "self"


def _pooling(
    space: int, operands: str, results: str, localize: Localize, linear: str | None = None
) -> Builder:
    """x: a tensor of the input's shape, seen through windows; y: one of the output's. The last `space` dims pool."""

    @empty_safe
    def build(call: OpCall) -> OpRule:
        ndim = call.tensor(_INPUT).ndim
        lead = ndim - space
        dims = space_dims(ndim, space)
        windows = _windows(call.tensor(_INPUT).shape[lead:], space, call.arguments)
        seen = [t for t, kind in enumerate(operands + results) if kind == "x"]
        return assemble(
            call.shapes,
            [dims] * len(operands),
            [dims] * len(results),
            linear=() if linear is None else linear_sets(call, linear),
            windows={(t, lead + d): window for t in seen for d, window in enumerate(windows)},
            localize=localize,
        )

    return build


def _windows(
    lengths: Sequence[int], space: int, call: Mapping[str, Any] | _Arguments
) -> tuple[SlidingWindow, ...]:
    """One per dim of space. call: the op's arguments by name."""
    kernel = per_dim(call["kernel_size"], space)
    stride = per_dim(call["stride"] or kernel, space)
    dilation = per_dim(call["dilation"], space) if "dilation" in call else [1] * space
    padding = per_dim(call["padding"], space)
    return tuple(
        SlidingWindow(*numbers) for numbers in zip(lengths, kernel, stride, dilation, padding, strict=True)
    )


@dataclass(frozen=True)
class _Arguments:
    """The op's arguments on this rank, by name."""

    ctx: LocalContext

    def __contains__(self, name: str) -> bool:
        return any(arg.name == name for arg in self.ctx.node.target._schema.arguments)  # type: ignore[union-attr]

    def __getitem__(self, name: str) -> Any:
        return argument(self.ctx, name)


@dataclass(frozen=True)
class _Site:
    """A pooling op on one rank. split: the dims of space that are; these are padded here and not by the op."""

    ctx: LocalContext
    lead: int
    lengths: tuple[int, ...]
    windows: tuple[SlidingWindow, ...]
    split: tuple[int, ...]

    @staticmethod
    def of(ctx: LocalContext, space: int) -> _Site:
        shape = global_tensor(ctx, _INPUT).shape
        lead = len(shape) - space
        lengths = tuple(shape[lead:])
        return _Site(ctx, lead, lengths, _windows(lengths, space, _Arguments(ctx)), split_dims(ctx, space))

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Those of the op that say where it pads."""
        padding = [0 if d in self.split else w.before for d, w in enumerate(self.windows)]
        stride = [w.stride for w in self.windows]
        return {"stride": stride, "padding": padding, "ceil_mode": False, **changes}

    def padded(self, fill: float) -> fx.Node:
        sides = [self._padding(d) for d in range(len(self.windows))]
        flat = [n for pair in reversed(sides) for n in pair]
        x = argument(self.ctx, _INPUT)
        return self.ctx.call(aten.constant_pad_nd.default, x, flat, fill) if any(flat) else x

    def unpadded(self, gradient: fx.Node) -> fx.Node:
        """Of the gradient of `padded`, that of the input."""
        for d in range(len(self.windows)):
            before, _ = self._padding(d)
            lo, hi = self._reads(d)
            gradient = self.ctx.call(aten.slice.Tensor, gradient, self.lead + d, before, before + hi - lo)
        return gradient

    def _results(self, dim: int) -> tuple[int, int]:
        return results_of(self.ctx, dim, 1)

    def _reads(self, dim: int) -> tuple[int, int]:
        return self.windows[dim].reads(*self._results(dim)) if dim in self.split else (0, self.lengths[dim])

    def _padding(self, dim: int) -> tuple[int, int]:
        if dim in self.split:
            return self.windows[dim].padding(*self._results(dim))
        return 0, self._beyond(dim)

    def _beyond(self, dim: int) -> int:
        """What `ceil_mode` needs behind a dim that is not split, beyond the padding that the op does."""
        window, count = self.windows[dim], self._count(dim)
        _, end = window.reach(0, count)
        return max(0, end - self.lengths[dim] - window.before)

    def _count(self, dim: int) -> int:
        """Results along a dim of space, in all."""
        values = self.ctx.node.meta["val"]
        name = "grad_output" if self._is_backward else None
        shape = (
            global_tensor(self.ctx, name).shape
            if name
            else (values[0] if isinstance(values, (tuple, list)) else values).shape
        )
        return int(shape[self.lead + dim])

    @property
    def _is_backward(self) -> bool:
        return "grad_output" in _Arguments(self.ctx)

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
        total: fx.Node | None = None
        for d in range(len(lengths)):
            inner, width = math.prod(lengths[d + 1 :]), math.prod(onto[d + 1 :])
            at = self.ctx.call(aten.div.Tensor_mode, index, inner, rounding_mode="floor")
            index = self.ctx.call(aten.remainder.Scalar, index, inner)
            if self.first(d):
                at = self.ctx.call(aten.add.Tensor, at, sign * self.first(d))
                at = self.ctx.call(aten.clamp.default, at, 0, onto[d] - 1)
            at = at if width == 1 else self.ctx.call(aten.mul.Tensor, at, width)
            total = at if total is None else self.ctx.call(aten.add.Tensor, total, at)
        assert total is not None
        return total

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
        lo, hi = results_of(self.ctx, dim, self._count(dim))
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
    return site.unpadded(again(ctx, **{_INPUT: site.padded(0.0)}, **changes))


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
    return site.unpadded(again(ctx, **{_INPUT: site.padded(0.0)}, **changes))
