"""The gradient of a convolution's input, space split by the input's positions.

Where `convolution_backward` splits space by its outputs, each rank leaves a summand of what its outputs read, and the
ranks exchange those. Here a rank computes its positions of the gradient whole, from the part of the output's gradient
that a transposed window reads: the exchange comes before, so it may be one with other windows', or travel behind the
interior.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from passes.layout.windows import SlidingWindow
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, aten, constant
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, OpRule
from passes.rules.plain.empty_results import neutral_where_empty
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.convolving import (
    ConvolutionWindow,
    local_arguments,
    reads_nothing,
    sides,
    windows_of,
)
from passes.rules.windowed.windowed import Site
from passes.rules.windowed.windows_in_space import pad_space

__all__ = ["input_gradient_by_positions"]


def _factor(dim: int) -> str:
    return f"x{dim}"


def input_gradient_by_positions(
    call: OpCall, channels: Mapping[str, tuple[Dim, ...]], sizes: Mapping[str, int], whole: tuple[str, ...]
) -> OpRule:
    """n (g o) *window(x), n (g i) *x, (g o) i *k -> n (g i) *x; o: sum

    channels: "input", "weight", "output" -> the first two dims of each; sizes, whole: of their factors.
    """
    space = call.tensor("weight").ndim - 2
    plain = tuple((_factor(d),) for d in range(space))
    # What positions of the input's gradient read of the output's: of a convolution the transposed windows.
    lengths, counts = (call.tensor(name).shape[2:] for name in ("grad_output", "input"))
    windows = windows_of(
        lengths,
        call.tensor("weight").shape[2:],
        not call["transposed"],
        *(call[name] for name in ("stride", "dilation", "padding")),
    )
    nothing: tuple[Dim, ...] = ()
    return neutral_where_empty(
        assemble(
            call.shapes,
            [
                (*channels["output"], *plain),
                (*channels["input"], *plain),
                (*channels["weight"], *((),) * space),
            ],
            [(*channels["input"], *plain), nothing, nothing],
            sizes=sizes,
            reductions={} if whole else {"o": "sum"},
            whole=whole,
            linear=linear_sets(call, "grad_output"),
            windows={(0, 2 + d): window for d, window in enumerate(windows)},
            localize=lambda ctx: _localize(Site(ctx, 2, windows, lengths, counts, _factor)),
        )
    )


def _localize(site: Site[ConvolutionWindow]) -> fx.Node | tuple[fx.Node | None, ...]:
    ctx, changes = site.ctx, local_arguments(site)
    if not site.split:
        return again(ctx, **changes)
    if reads_nothing(site):
        return (constant(ctx, 0), None, None)
    before, after = sides(site), [(0, 0)] * len(site.windows)
    if not isinstance(site.windows[0], SlidingWindow):
        before, after = after, before
    grad = pad_space(ctx, argument(ctx, "grad_output"), before)
    lead, lengths = ctx.result_shape()[:2], zip(site.result_lengths, after, strict=True)
    # Read for its shape alone: nothing need be put together.
    like = ctx.call(aten.new_empty.default, grad, [*lead, *(n - sum(side) for n, side in lengths)])
    found = ctx.call(operator.getitem, again(ctx, grad_output=grad, input=like, **changes), 0)
    return (pad_space(ctx, found, after), None, None)
