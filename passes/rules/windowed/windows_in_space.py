"""The last dims of a tensor as space, whose factors y0, y1, ... are those of an op's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import fx

from passes.rules.core.emit_op import aten
from passes.rules.core.rule import Dim, LocalContext

__all__ = [
    "pad_space",
    "per_dim",
    "relocated",
    "scattered",
    "space_dims",
    "space_factor",
    "unpad_space",
]

Placed = tuple[fx.Node, fx.Node]
"""(positions along a dim, what belongs there)."""


def space_factor(dim: int) -> str:
    """The factor of a dim of space, counted from 0."""
    return f"y{dim}"


def space_dims(ndim: int, space: int) -> tuple[Dim, ...]:
    """Dims of a tensor whose last `space` dims are space, and whose others just pass."""
    lead = ndim - space
    return (*((f"b{d}",) for d in range(lead)), *((space_factor(d),) for d in range(space)))


def per_dim(values: int | Sequence[int], space: int) -> list[int]:
    """One number, or a list of one, means that number for every dim."""
    found = [values] if isinstance(values, int) else [int(n) for n in values]
    return found * space if len(found) == 1 else found


def pad_space(ctx: LocalContext, x: fx.Node, sides: Sequence[tuple[int, int]], fill: float = 0) -> fx.Node:
    """`fill` before and after every dim of space, of which there are as many as `sides`; negative numbers cut."""
    flat = [n for pair in reversed(sides) for n in pair]
    if not any(n > 0 for n in flat):  # a view will do
        return _cut(ctx, x, sides)
    return ctx.call(aten.constant_pad_nd.default, x, flat, fill)


def _cut(ctx: LocalContext, x: fx.Node, sides: Sequence[tuple[int, int]]) -> fx.Node:
    for d, (before, after) in enumerate(sides):
        if before or after:
            # From the end of the tensor, whose length is not known here: slices count negative ends so.
            x = ctx.call(aten.slice.Tensor, x, d - len(sides), -before, after or 2**63 - 1)
    return x


def unpad_space(ctx: LocalContext, x: fx.Node, sides: Sequence[tuple[int, int]]) -> fx.Node:
    """What `pad_space` has padded with `sides`."""
    return pad_space(ctx, x, [(-before, -after) for before, after in sides])


def scattered(ctx: LocalContext, like: fx.Node, sizes: Sequence[int], dim: int, *parts: Placed) -> fx.Node:
    """Zeros of `sizes`, with every part added at its places of `dim`: the transpose of picking these places."""
    total = ctx.call(aten.new_zeros.default, like, list(sizes))
    for places, part in parts:
        total = ctx.call(aten.index_add.default, total, dim, places, part)
    return total


def relocated(
    ctx: LocalContext,
    index: fx.Node,
    lengths: Sequence[int],
    onto: Sequence[int],
    move: Callable[[int, fx.Node], fx.Node],
) -> fx.Node:
    """Places in a flat array of `lengths` as places in one of `onto`; `move` takes a dim and the positions along it."""
    total: fx.Node | None = None
    for d in range(len(lengths)):
        inner, width = math.prod(lengths[d + 1 :]), math.prod(onto[d + 1 :])
        at = ctx.call(aten.div.Tensor_mode, index, inner, rounding_mode="floor")
        index = ctx.call(aten.remainder.Scalar, index, inner)
        at = move(d, at)
        at = at if width == 1 else ctx.call(aten.mul.Tensor, at, width)
        total = at if total is None else ctx.call(aten.add.Tensor, total, at)
    assert total is not None
    return total
