"""Neighbourhood attention and its backward: batch, heads and space split. Space is split by the queries, which see a
window of the keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from passes.layout.windows import NeighborhoodWindow
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again, argument, offset
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, LocalContext, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.windows_in_space import space_factor, split_dims

__all__ = ["neighborhood_attention", "neighborhood_attention_backward"]


@empty_safe
def neighborhood_attention(call: OpCall) -> OpRule:
    """b *y h d, b *window(y) h d, b *window(y) h e -> b *y h e; d: whole; e: whole"""
    queries, values = _dims(call, "d"), _dims(call, "e")
    return assemble(
        call.shapes,
        [queries, queries, values],
        [values],
        whole=("d", "e"),
        windows=_seen(call, (1, 2)),
        localize=_localize,
    )


@empty_safe
def neighborhood_attention_backward(call: OpCall) -> OpRule:
    """b *y h e, b *y h d, b *window(y) h d, b *window(y) h e -> b *y h d, b *window(y) h d, b *window(y) h e

    d: whole; e: whole
    """
    queries, values = _dims(call, "d"), _dims(call, "e")
    return assemble(
        call.shapes,
        [values, queries, queries, values],
        [queries, queries, values],
        whole=("d", "e"),
        linear=linear_sets(call, "grad_out"),
        windows=_seen(call, (2, 3, 5, 6)),
        localize=_localize,
    )


def _dims(call: OpCall, last: str) -> tuple[Dim, ...]:
    space = len(call["lengths"])
    return (("b",), *((space_factor(d),) for d in range(space)), ("h",), (last,))


def _windows(
    lengths: Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int], is_causal: Sequence[bool]
) -> list[NeighborhoodWindow]:
    """One per dim of space."""
    return [NeighborhoodWindow(*each) for each in zip(lengths, kernel_size, dilation, is_causal, strict=True)]


_WINDOW = ("lengths", "kernel_size", "dilation", "is_causal")


def _seen(call: OpCall, tensors: Sequence[int]) -> dict[tuple[int, int], NeighborhoodWindow]:
    """The dims of space of `tensors`, counted through operands and results."""
    windows = _windows(*(call[name] for name in _WINDOW))
    return {(t, 1 + d): window for t in tensors for d, window in enumerate(windows)}


def _localize(ctx: LocalContext) -> fx.Node:
    """Say where this rank's queries and keys lie in the whole."""
    windows = _windows(*(argument(ctx, name) for name in _WINDOW))
    split = split_dims(ctx, len(windows))
    if not split:
        return again(ctx)
    changes: dict[str, Any] = {
        "first_query": [offset(ctx, space_factor(d)) for d in range(len(windows))],
        "first_key": [
            window.reads(*ctx.interval(space_factor(d)))[0] if d in split else 0
            for d, window in enumerate(windows)
        ],
    }
    return again(ctx, **changes)
