"""Convolution: batch, channels and space split. Space is split by its results, which read a window of the input."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from passes.layout.windows import SlidingWindow, TransposedWindow
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, aten, constant, first_part, global_tensor, is_empty
from passes.rules.core.opcall import OpCall, describe
from passes.rules.core.rule import Dim, LocalContext, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.input_gradient import input_gradient_by_positions
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.convolving import ConvolutionWindow, local_arguments, windows_of
from passes.rules.windowed.windows_in_space import pad_space, space_factor, split_dims

__all__ = ["convolution", "convolution_backward"]


@dataclass(frozen=True)
class _Dims:
    """Dims of a convolution's tensors. Groups g are the major part of the channels: g may be split,
    and then a group's own channels i and o not. Without groups g is 1, and i and o may be. Space is y0, y1, ..., of
    the output; the input is seen through `windows`, one per dim."""

    input: tuple[Dim, ...]
    weight: tuple[Dim, ...]
    output: tuple[Dim, ...]
    channels: tuple[Dim, ...]
    sizes: dict[str, int]
    whole: tuple[str, ...]
    windows: tuple[ConvolutionWindow, ...]

    @staticmethod
    def of(call: OpCall) -> _Dims:
        weight = call.tensor("weight")
        groups, space = int(call["groups"]), weight.ndim - 2
        before, after = weight.shape[0] // groups, weight.shape[1]
        inner, outer = (before, after) if call["transposed"] else (after, before)
        kernel: tuple[Dim, ...] = (("g", "i"), ("o",)) if call["transposed"] else (("g", "o"), ("i",))
        outputs = tuple((space_factor(d),) for d in range(space))
        return _Dims(
            input=(("n",), ("g", "i"), *outputs),
            weight=(*kernel, *((),) * space),
            output=(("n",), ("g", "o"), *outputs),
            channels=(("g", "o"),),
            sizes={"g": groups, "i": inner, "o": outer},
            whole=("i", "o") if groups > 1 else (),
            windows=windows_of(
                call.tensor("input").shape[2:],
                weight.shape[2:],
                bool(call["transposed"]),
                *(call[name] for name in ("stride", "dilation", "padding")),
            ),
        )


@empty_safe
def convolution(call: OpCall) -> OpRule:
    """n (g i) *window(y), (g o) i *k, (g o) -> n (g o) *y; i: sum

    With i split, one rank adds the bias.
    """
    named = _Dims.of(call)
    linear = ("input", "weight") if call["bias"] is None else ("input bias", "weight bias")
    return assemble(
        call.shapes,
        [named.input, named.weight, named.channels][: len(call.operands)],
        [named.output],
        sizes=named.sizes,
        reductions={"i": "sum"},
        whole=named.whole,
        linear=linear_sets(call, *linear),
        windows={(0, 2 + d): window for d, window in enumerate(named.windows)},
        localize=_convolution,
    )


def _convolution(ctx: LocalContext) -> fx.Node:
    site = _Site.of(ctx)
    bias = argument(ctx, "bias") if first_part(ctx, "i") else None
    if not argument(ctx, "transposed"):
        return again(ctx, input=site.padded(), bias=bias, **site.arguments())
    if not site.split:
        return again(ctx, bias=bias, **site.arguments())
    if site.reads_nothing:
        result = constant(ctx, 0)
    else:
        result = site.cut(again(ctx, bias=None, **site.arguments()))
    if bias is None:
        return result
    return ctx.call(aten.add.Tensor, result, ctx.call(aten.view.default, bias, [-1, *[1] * site.space]))


@dataclass(frozen=True)
class _Site:
    """A convolution on one rank. split: the dims of space that are; their windows are not padded by the op but here,
    where it is known what lies beyond this rank's part."""

    ctx: LocalContext
    input: fx.Node
    windows: tuple[ConvolutionWindow, ...]
    split: tuple[int, ...]

    @staticmethod
    def of(ctx: LocalContext) -> _Site:
        windows = _Dims.of(describe(ctx.node)).windows
        return _Site(ctx, argument(ctx, "input"), windows, split_dims(ctx, len(windows)))

    @property
    def space(self) -> int:
        return len(self.windows)

    @property
    def reads_nothing(self) -> bool:
        return any(lo == hi for lo, hi in (self._reads(d) for d in self.split))

    def _reads(self, dim: int) -> tuple[int, int]:
        return self.windows[dim].reads(*self.ctx.interval(space_factor(dim)))

    def arguments(self) -> dict[str, Any]:
        """The op's arguments on this rank that are no tensors."""
        return local_arguments(self.ctx, self.space, self.split)

    def padded(self) -> fx.Node:
        """The input with all that the windows of this rank's results reach."""
        return pad_space(
            self.ctx, self.input, [self._padding(d) if d in self.split else (0, 0) for d in range(self.space)]
        )

    def padded_shape(self) -> fx.Node:
        """A tensor of the shape of `padded`, for a backward that reads no more of it: nothing need be put together."""
        lengths = self.ctx.result_shape(0)
        for d in range(self.space):
            before, after = self._padding(d) if d in self.split else (0, 0)
            lengths[2 + d] += before + after
        return self.ctx.call(aten.new_empty.default, argument(self.ctx, "grad_output"), lengths)

    def unpadded(self, gradient: fx.Node) -> fx.Node:
        """Of the gradient of `padded`, that of the input."""
        for d in self.split:
            before, _ = self._padding(d)
            lo, hi = self._reads(d)
            gradient = self.ctx.call(aten.slice.Tensor, gradient, 2 + d, before, before + hi - lo)
        return gradient

    def _padding(self, dim: int) -> tuple[int, int]:
        window = self.windows[dim]
        assert isinstance(window, SlidingWindow)
        return window.padding(*self.ctx.interval(space_factor(dim)))

    def cut(self, result: fx.Node) -> fx.Node:
        """Of what this rank's inputs add to (transposed), this rank's results."""
        return pad_space(
            self.ctx, result, [self._margins(d) if d in self.split else (0, 0) for d in range(self.space)]
        )

    def uncut(self, gradient: fx.Node) -> fx.Node:
        """The gradient of what `cut` was given."""
        sides = [self._margins(d) if d in self.split else (0, 0) for d in range(self.space)]
        return pad_space(self.ctx, gradient, [(-before, -after) for before, after in sides])

    def _margins(self, dim: int) -> tuple[int, int]:
        window = self.windows[dim]
        assert isinstance(window, TransposedWindow)
        start, end = window.writes(*self._reads(dim))
        lo, hi = self.ctx.interval(space_factor(dim))
        return start - lo, hi - end


@empty_safe
def convolution_backward(call: OpCall) -> OpRule:
    """n (g o) *y, n (g i) *window(y), (g o) i *k -> n (g i) *window(y), (g o) i *k, (g o); n: sum; o: sum; *y: sum

    The second result lacks n, the first lacks o. A result masked out has no dims. The input's gradient alone may
    be split by the input's positions as well.
    """
    named = _Dims.of(call)
    wanted = [named.input, named.weight, named.channels]
    results = [dims if info is not None else () for dims, info in zip(wanted, call.results, strict=True)]
    reductions = dict.fromkeys(("n", *(space_factor(d) for d in range(len(named.windows)))), "sum")
    if not named.whole:
        reductions["o"] = "sum"
    seen = (1, 3) if call.results[0] is not None else (1,)
    rule = assemble(
        call.shapes,
        [named.output, named.input, named.weight],
        results,
        sizes=named.sizes,
        reductions=reductions,
        whole=named.whole,
        linear=linear_sets(call, "grad_output"),
        windows={(t, 2 + d): window for t in seen for d, window in enumerate(named.windows)},
        localize=_convolution_backward,
    )
    if [info is not None for info in call.results] != [True, False, False]:
        return rule
    channels = {"input": named.input[:2], "weight": named.weight[:2], "output": named.output[:2]}
    return replace(rule, others=(input_gradient_by_positions(call, channels, named.sizes, named.whole),))


def _convolution_backward(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
    mask = argument(ctx, "output_mask")
    site = _Site.of(ctx)
    transposed = bool(argument(ctx, "transposed"))
    if is_empty(ctx, "i") or (transposed and site.reads_nothing):  # then only the bias's gradient is left
        zeros = [constant(ctx, 0, i) if mask[i] else None for i in (0, 1)]
        total = ctx.call(aten.sum.dim_IntList, argument(ctx, "grad_output"), _all_but_channels(ctx))
        return (*zeros, total if mask[2] else None)
    changes: dict[str, Any] = site.arguments()
    if argument(ctx, "bias_sizes") is not None and mask[2]:
        changes["bias_sizes"] = ctx.result_shape(2)
    if not site.split:
        return again(ctx, **changes)
    if not transposed:
        found = again(ctx, input=site.padded() if mask[1] or mask[2] else site.padded_shape(), **changes)
        parts = [ctx.call(operator.getitem, found, i) if mask[i] else None for i in range(3)]
        first = None if parts[0] is None else site.unpadded(parts[0])
        return (first, *parts[1:])
    # The bias adds to this rank's results alone; a gradient that is cut or padded would be summed wrongly.
    grad = argument(ctx, "grad_output")
    changes.update(bias_sizes=None, output_mask=[mask[0], mask[1], False])
    found = again(ctx, grad_output=site.uncut(grad), **changes)
    parts = [ctx.call(operator.getitem, found, i) if mask[i] else None for i in range(2)]
    return (*parts, ctx.call(aten.sum.dim_IntList, grad, _all_but_channels(ctx)) if mask[2] else None)


def _all_but_channels(ctx: LocalContext) -> list[int]:
    return [d for d in range(global_tensor(ctx, "grad_output").ndim) if d != 1]
