"""What the rules of a convolution and of its gradients share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from passes.layout.windows import SlidingWindow, TransposedWindow
from passes.rules.core.emit_op import argument
from passes.rules.core.rule import LocalContext
from passes.rules.windowed.windows_in_space import per_dim

__all__ = ["ConvolutionWindow", "local_arguments", "windows_of"]

ConvolutionWindow = SlidingWindow | TransposedWindow


def windows_of(
    lengths: Sequence[int], kernel: Sequence[int], transposed: bool, *lists: Sequence[int]
) -> tuple[ConvolutionWindow, ...]:
    """One per dim of space. lengths: of what is seen through them. lists: stride, dilation and padding."""
    make = TransposedWindow if transposed else SlidingWindow
    each = zip(lengths, kernel, *(per_dim(values, len(kernel)) for values in lists), strict=True)
    return tuple(make(*(int(n) for n in numbers)) for numbers in each)


def local_arguments(ctx: LocalContext, space: int, split: Collection[int]) -> dict[str, Any]:
    """The op's arguments on this rank that are no tensors; dims in `split` are not padded by the op."""
    changes: dict[str, Any] = {"groups": _groups(ctx)}
    for name in ("padding", "output_padding"):
        values = per_dim(argument(ctx, name), space)
        changes[name] = [0 if d in split else n for d, n in enumerate(values)]
    return changes


def _groups(ctx: LocalContext) -> int:
    if not ctx.is_split("g"):
        return int(argument(ctx, "groups"))
    low, high = ctx.interval("g")
    return high - low
