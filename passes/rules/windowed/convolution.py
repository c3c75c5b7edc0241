"""Convolution: batch, channels and space split. Space is split by its results, which read a window of the input."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from passes.layout.windows import SlidingWindow, TransposedWindow
from passes.rules.core.assemble import (
    again,
    argument,
    aten,
    constant,
    empty_safe,
    first_part,
    is_empty,
    neutral_where_empty,
    rule_of,
)
from passes.rules.core.rule import Dim, LocalContext, OpCall, OpRule
from passes.rules.windowed.windowed import Site, pad_space, per_dim, space_factor, unpad_space, windows_of

ConvolutionWindow = SlidingWindow | TransposedWindow


def _windows(call: OpCall, lengths: Sequence[int], transposed: bool) -> list[ConvolutionWindow]:
    """One per dim of space. lengths: of what is seen through them."""
    make, kernel = TransposedWindow if transposed else SlidingWindow, call.tensor("weight").shape[2:]
    return windows_of(make, lengths, kernel, call["stride"], call["dilation"], call["padding"])


def _sides(site: Site[ConvolutionWindow]) -> list[tuple[int, int]]:
    """Per dim of space, what to pad at both ends (or cut, where negative) since the op is not to: of a sliding
    window's operand, or of what comes out of the op on what a transposed window reads."""
    found = [(0, 0)] * len(site.windows)
    for d in site.split:
        window, (lo, hi) = site.windows[d], site.results(d)
        if isinstance(window, SlidingWindow):
            found[d] = window.padding(lo, hi)
        else:
            start, end = window.reach(*site.reads(d))
            found[d] = start - lo, hi - end
    return found


def _arguments(site: Site[ConvolutionWindow]) -> dict[str, Any]:
    """The op's arguments on this rank that are no tensors; dims that are split are not padded by the op."""
    ctx, split = site.ctx, site.split
    changes: dict[str, Any] = {"groups": argument(ctx, "groups")}
    if ctx.is_split("g"):
        low, high = ctx.interval("g")
        changes["groups"] = high - low
    for name in ("padding", "output_padding"):
        values = per_dim(argument(ctx, name), len(site.windows))
        changes[name] = [0 if d in split else n for d, n in enumerate(values)]
    return changes


def _position(dim: int) -> str:
    return f"x{dim}"


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
    windows: Sequence[ConvolutionWindow]
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
            windows=_windows(call, call.tensor("input").shape[2:], bool(call["transposed"])),
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
    return rule_of(
        call,
        [named.input, named.weight, named.channels][: len(call.operands)],
        [named.output],
        sizes=named.sizes,
        reductions={"i": "sum"},
        whole=named.whole,
        linear=linear,
        windows={(0, 2 + d): window for d, window in enumerate(named.windows)},
        localize=lambda ctx: _convolution(named.site(ctx), bool(call["transposed"])),
    )


def _convolution(site: Site[ConvolutionWindow], transposed: bool) -> fx.Node:
    ctx, arguments = site.ctx, _arguments(site)
    bias = argument(ctx, "bias") if first_part(ctx, "i") else None
    if not transposed:
        x = pad_space(ctx, argument(ctx, "input"), _sides(site))
        return again(ctx, input=x, bias=bias, **arguments)
    if not site.split:
        return again(ctx, bias=bias, **arguments)
    if 0 in site.input_lengths:
        result = constant(ctx, 0)
    else:
        result = pad_space(ctx, again(ctx, bias=None, **arguments), _sides(site))
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
    rule = rule_of(
        call,
        [named.output, named.input, named.weight],
        results,
        sizes=named.sizes,
        reductions=reductions,
        whole=named.whole,
        linear="grad_output",
        windows={(t, 2 + d): window for t in seen for d, window in enumerate(named.windows)},
        localize=lambda ctx: _convolution_backward(named.site(ctx), bool(call["transposed"])),
    )
    if [info is not None for info in call.results] != [True, False, False]:
        return rule
    return replace(rule, others=(_input_gradient_by_positions(call, named),))


def _input_gradient_by_positions(call: OpCall, named: _Dims) -> OpRule:
    """n (g o) *window(x), n (g i) *x, (g o) i *k -> n (g i) *x; o: sum

    Where `convolution_backward` splits space by its outputs, each rank leaves a summand of what its outputs read, and
    the ranks exchange those. Here a rank computes its positions of the gradient whole, from the part of the output's
    gradient that a transposed window reads: the exchange comes before, so it may be one with other windows', or travel
    behind the interior.
    """
    plain = tuple((_position(d),) for d in range(len(named.windows)))
    output, input_ = ((*dims[:2], *plain) for dims in (named.output, named.input))
    # What positions of the input's gradient read of the output's: of a convolution the transposed windows.
    windows = _windows(call, named.counts, not call["transposed"])
    nothing: tuple[Dim, ...] = ()
    return neutral_where_empty(
        rule_of(
            call,
            [output, input_, named.weight],
            [input_, nothing, nothing],
            sizes=named.sizes,
            reductions={} if named.whole else {"o": "sum"},
            whole=named.whole,
            linear="grad_output",
            windows={(0, 2 + d): window for d, window in enumerate(windows)},
            localize=lambda ctx: _by_positions(Site(ctx, 2, windows, named.counts, named.lengths, _position)),
        )
    )


def _by_positions(site: Site[ConvolutionWindow]) -> fx.Node | tuple[fx.Node | None, ...]:
    ctx, changes = site.ctx, _arguments(site)
    if not site.split:
        return again(ctx, **changes)
    if 0 in site.input_lengths:
        return (constant(ctx, 0), None, None)
    before, after = _sides(site), [(0, 0)] * len(site.windows)
    if not isinstance(site.windows[0], SlidingWindow):
        before, after = after, before
    grad = pad_space(ctx, argument(ctx, "grad_output"), before)
    lead, lengths = ctx.result_shape()[:2], zip(site.result_lengths, after, strict=True)
    # Read for its shape alone: nothing need be put together.
    like = ctx.call(aten.new_empty.default, grad, [*lead, *(n - sum(side) for n, side in lengths)])
    found = ctx.call(operator.getitem, again(ctx, grad_output=grad, input=like, **changes), 0)
    return (pad_space(ctx, found, after), None, None)


def _convolution_backward(
    site: Site[ConvolutionWindow], transposed: bool
) -> fx.Node | tuple[fx.Node | None, ...]:
    ctx, changes = site.ctx, _arguments(site)
    mask, grad = argument(ctx, "output_mask"), argument(ctx, "grad_output")

    def total() -> fx.Node | None:
        """The bias's gradient."""
        all_but_channels = [0, *range(2, 2 + len(site.windows))]
        return ctx.call(aten.sum.dim_IntList, grad, all_but_channels) if mask[2] else None

    if is_empty(ctx, "i") or (transposed and 0 in site.input_lengths):
        return (*(constant(ctx, 0, i) if mask[i] else None for i in (0, 1)), total())
    if argument(ctx, "bias_sizes") is not None and mask[2]:
        changes["bias_sizes"] = ctx.result_shape(2)
    if not site.split:
        return again(ctx, **changes)
    padding = _sides(site)
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
