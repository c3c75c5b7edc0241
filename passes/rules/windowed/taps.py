"""Results along a dim as weighted sums of positions of the operand, and the transpose of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from passes.rules.core.emit_op import aten
from passes.rules.core.rule import LocalContext
from passes.rules.windowed.windows_in_space import scattered

__all__ = ["Taps", "mixed", "mixed_back"]


@dataclass(frozen=True)
class Taps:
    """What each of `results` results of one dim is made of.

    places:  int64[results * count], positions in this rank's operand.
    weights: [results, count], of the operand's dtype; None: there is one position, of weight 1.
    """

    results: int
    count: int
    places: fx.Node
    weights: fx.Node | None = None


def mixed(ctx: LocalContext, x: fx.Node, shape: Sequence[int], dim: int, taps: Taps) -> fx.Node:
    """`x`, of `shape`, with the results in place of `dim`."""
    x = ctx.call(aten.index_select.default, x, dim, taps.places)
    if taps.weights is None:
        return x
    x = ctx.call(aten.reshape.default, x, [*shape[:dim], taps.results, taps.count, *shape[dim + 1 :]])
    return ctx.call(aten.sum.dim_IntList, _weighted(ctx, x, taps, len(shape) - 1 - dim), [dim + 1])


def mixed_back(ctx: LocalContext, grad: fx.Node, shape: Sequence[int], dim: int, taps: Taps) -> fx.Node:
    """Of the gradient of `mixed`, that of its operand, of `shape`."""
    if taps.weights is not None:
        each = ctx.call(aten.unsqueeze.default, grad, dim + 1)
        each = _weighted(ctx, each, taps, len(shape) - 1 - dim)
        sizes = [*shape[:dim], taps.results * taps.count, *shape[dim + 1 :]]
        grad = ctx.call(aten.reshape.default, each, sizes)
    return scattered(ctx, grad, shape, dim, (taps.places, grad))


def _weighted(ctx: LocalContext, x: fx.Node, taps: Taps, after: int) -> fx.Node:
    shaped = ctx.call(aten.view.default, taps.weights, [taps.results, taps.count, *[1] * after])
    return ctx.call(aten.mul.Tensor, x, shaped)
