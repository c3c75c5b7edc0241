"""What the rules of a convolution and of its gradients share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from passes.layout.windows import SlidingWindow, TransposedWindow
from passes.rules.core.emit_op import argument
from passes.rules.windowed.windowed import Site
from passes.rules.windowed.windows_in_space import per_dim

__all__ = ["ConvolutionWindow", "local_arguments", "reads_nothing", "sides", "windows_of"]

ConvolutionWindow = SlidingWindow | TransposedWindow


def windows_of(
    lengths: Sequence[int], kernel: Sequence[int], transposed: bool, *lists: Sequence[int]
) -> tuple[ConvolutionWindow, ...]:
    """One per dim of space. lengths: of what is seen through them. lists: stride, dilation and padding."""
    make = TransposedWindow if transposed else SlidingWindow
    each = zip(lengths, kernel, *(per_dim(values, len(kernel)) for values in lists), strict=True)
    return tuple(make(*(int(n) for n in numbers)) for numbers in each)


def sides(site: Site[ConvolutionWindow]) -> list[tuple[int, int]]:
    """Per dim of space, what to pad at both ends (or cut, where negative) since the op is not to: of a sliding
    window's operand, or of what comes out of the op on what a transposed window reads."""
    found = [(0, 0)] * len(site.windows)
    for d in site.split:
        window, (lo, hi) = site.windows[d], site.results(d)
        if isinstance(window, SlidingWindow):
            found[d] = window.padding(lo, hi)
        else:
            start, end = window.writes(*site.reads(d))
            found[d] = start - lo, hi - end
    return found


def reads_nothing(site: Site[ConvolutionWindow]) -> bool:
    return 0 in site.input_lengths


def local_arguments(site: Site[ConvolutionWindow]) -> dict[str, Any]:
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
