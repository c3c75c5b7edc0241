"""Convolution: batch, channels and space split. Space is split by its results, which read a window of the input."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from torch import fx

from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, aten, constant, first_part, is_empty
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, LocalContext, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.input_gradient import input_gradient_by_positions
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.convolving import (
    ConvolutionWindow,
    local_arguments,
    reads_nothing,
    sides,
    windows_of,
)
from passes.rules.windowed.windowed import Site
from passes.rules.windowed.windows_in_space import pad_space, space_factor, unpad_space

__all__ = ["convolution", "convolution_backward"]


@dataclass(frozen=True)
class _Dims:
    """Dims of a convolution's tensors. Groups g are the major part of the channels: g may be split,
    and then a group's own channels i and o not. Without groups g is 1, and i and o may be. Space is y0, y1, ..., of
    the output; the input is seen through `windows`, one per dim. lengths, counts: of both, along it."""

    input: tuple[Dim, ...]
    weight: tuple[Dim, ...]
    output: tuple[Dim, ...]
    channels: tuple[Dim, ...]
    sizes: dict[str, int]
    whole: tuple[str, ...]
    windows: tuple[ConvolutionWindow, ...]
    lengths: tuple[int, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(call: OpCall) -> _Dims:
        weight = call.tensor("weight")
        result = call.tensor("grad_output") if "grad_output" in call.arguments else call.result
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
            lengths=call.tensor("input").shape[2:],
            counts=result.shape[2:],
        )

    def site(self, ctx: LocalContext) -> Site[ConvolutionWindow]:
        return Site(ctx, 2, self.windows, self.lengths, self.counts)


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
        localize=lambda ctx: _convolution(named.site(ctx), bool(call["transposed"])),
    )


def _convolution(site: Site[ConvolutionWindow], transposed: bool) -> fx.Node:
    ctx, arguments = site.ctx, local_arguments(site)
    bias = argument(ctx, "bias") if first_part(ctx, "i") else None
    if not transposed:
        x = pad_space(ctx, argument(ctx, "input"), sides(site))
        return again(ctx, input=x, bias=bias, **arguments)
    if not site.split:
        return again(ctx, bias=bias, **arguments)
    if reads_nothing(site):
        result = constant(ctx, 0)
    else:
        result = pad_space(ctx, again(ctx, bias=None, **arguments), sides(site))
    if bias is None:
        return result
    shaped = ctx.call(aten.view.default, bias, [-1, *[1] * len(site.windows)])
    return ctx.call(aten.add.Tensor, result, shaped)


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
        localize=lambda ctx: _convolution_backward(named.site(ctx), bool(call["transposed"])),
    )
    if [info is not None for info in call.results] != [True, False, False]:
        return rule
    channels = {"input": named.input[:2], "weight": named.weight[:2], "output": named.output[:2]}
    return replace(rule, others=(input_gradient_by_positions(call, channels, named.sizes, named.whole),))


def _convolution_backward(
    site: Site[ConvolutionWindow], transposed: bool
) -> fx.Node | tuple[fx.Node | None, ...]:
    ctx, changes = site.ctx, local_arguments(site)
    mask, grad = argument(ctx, "output_mask"), argument(ctx, "grad_output")

    def total() -> fx.Node | None:
        """The bias's gradient."""
        all_but_channels = [0, *range(2, 2 + len(site.windows))]
        return ctx.call(aten.sum.dim_IntList, grad, all_but_channels) if mask[2] else None

    if is_empty(ctx, "i") or (transposed and reads_nothing(site)):
        return (*(constant(ctx, 0, i) if mask[i] else None for i in (0, 1)), total())
    if argument(ctx, "bias_sizes") is not None and mask[2]:
        changes["bias_sizes"] = ctx.result_shape(2)
    if not site.split:
        return again(ctx, **changes)
    padding = sides(site)
    if not transposed:
        given = mask[1] or mask[2]
        x = pad_space(ctx, argument(ctx, "input"), padding) if given else site.empty_padded(grad, padding)
        found = again(ctx, input=x, **changes)
        parts = [ctx.call(operator.getitem, found, i) if mask[i] else None for i in range(3)]
        return (None if parts[0] is None else unpad_space(ctx, parts[0], padding), *parts[1:])
    # The bias adds to this rank's results alone; a gradient that is cut or padded would be summed wrongly.
    changes.update(bias_sizes=None, output_mask=[mask[0], mask[1], False])
    found = again(ctx, grad_output=unpad_space(ctx, grad, padding), **changes)
    return (*(ctx.call(operator.getitem, found, i) if mask[i] else None for i in range(2)), total())
