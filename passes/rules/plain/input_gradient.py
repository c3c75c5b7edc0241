"""The gradient of a convolution's input, space split by the input's positions.

Where `convolution_backward` splits space by its outputs, each rank leaves a summand of what its outputs read, and the
ranks exchange those. Here a rank computes its positions of the gradient whole, from the part of the output's gradient
that a transposed window reads: the exchange comes before, so it may be one with other windows', or travel behind the
interior.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from passes.layout.windows import SlidingWindow
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, aten, constant
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, LocalContext, OpRule
from passes.rules.plain.empty_results import neutral_where_empty
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.convolving import ConvolutionWindow, local_arguments, windows_of
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
    windows = windows_of(
        call.tensor("grad_output").shape[2:],
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
            localize=lambda ctx: _localize(ctx, windows),
        )
    )


def _localize(
    ctx: LocalContext, windows: Sequence[ConvolutionWindow]
) -> fx.Node | tuple[fx.Node | None, ...]:
    split = [d for d in range(len(windows)) if ctx.is_split(_factor(d))]
    changes = local_arguments(ctx, len(windows), split)
    if not split:
        return again(ctx, **changes)
    spans = {d: ctx.interval(_factor(d)) for d in split}
    reads = {d: windows[d].reads(*spans[d]) for d in split}
    if any(lo >= hi for lo, hi in reads.values()):
        return (constant(ctx, 0), None, None)
    shape, before, after = ctx.result_shape(0), [(0, 0)] * len(windows), [(0, 0)] * len(windows)
    for d in split:
        window = windows[d]
        if isinstance(window, SlidingWindow):
            before[d] = window.padding(*spans[d])
        else:
            start, end = window.writes(*reads[d])
            shape[2 + d] = end - start
            after[d] = start - spans[d][0], spans[d][1] - end
    grad = pad_space(ctx, argument(ctx, "grad_output"), before)
    like = ctx.call(
        aten.new_empty.default, grad, shape
    )  # read for its shape alone: nothing need be put together
    found = ctx.call(operator.getitem, again(ctx, grad_output=grad, input=like, **changes), 0)
    return (pad_space(ctx, found, after), None, None)
