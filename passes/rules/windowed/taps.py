"""Results along a dim as weighted sums of positions of the operand, and the transpose of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.rules.core.emit_op import aten
from passes.rules.core.rule import LocalContext
from passes.rules.windowed.windowed import Site
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


def mixed(site: Site[Any], x: fx.Node, taps: Callable[[int], Taps]) -> fx.Node:
    """`x`, a rank's input, with the results in place of each dim of space."""
    ctx, shape = site.ctx, [*site.ctx.result_shape()[: site.lead], *site.input_lengths]
    for d in range(len(site.windows)):
        dim, found = site.lead + d, taps(d)
        x = ctx.call(aten.index_select.default, x, dim, found.places)
        if found.weights is not None:
            x = ctx.call(
                aten.reshape.default, x, [*shape[:dim], found.results, found.count, *shape[dim + 1 :]]
            )
            x = ctx.call(aten.sum.dim_IntList, _weighted(ctx, x, found, len(shape) - 1 - dim), [dim + 1])
        shape[dim] = found.results
    return x


def mixed_back(site: Site[Any], grad: fx.Node, taps: Callable[[int], Taps]) -> fx.Node:
    """Of the gradient of `mixed`, that of its input."""
    ctx, shape = site.ctx, site.ctx.result_shape()
    for d in reversed(range(len(site.windows))):
        dim, found = site.lead + d, taps(d)
        before, after = [*shape[: site.lead], *site.result_lengths[:d]], shape[dim + 1 :]
        if found.weights is not None:
            each = ctx.call(aten.unsqueeze.default, grad, dim + 1)
            each = _weighted(ctx, each, found, len(after))
            grad = ctx.call(aten.reshape.default, each, [*before, found.results * found.count, *after])
        grad = scattered(ctx, grad, [*before, shape[dim], *after], dim, (found.places, grad))
    return grad


def _weighted(ctx: LocalContext, x: fx.Node, taps: Taps, after: int) -> fx.Node:
    shaped = ctx.call(aten.view.default, taps.weights, [taps.results, taps.count, *[1] * after])
    return ctx.call(aten.mul.Tensor, x, shaped)
