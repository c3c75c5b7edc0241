"""Neighbourhood attention and its backward: batch, heads and space split. Space is split by the queries, which see a
window of the keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from passes.layout.windows import NeighborhoodWindow
from passes.rules.core.assemble import assemble
from passes.rules.core.emit_op import again
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, LocalContext, Localize, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.windowed import Site
from passes.rules.windowed.windows_in_space import space_factor

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
        localize=_localize(call),
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
        localize=_localize(call),
    )


def _dims(call: OpCall, last: str) -> tuple[Dim, ...]:
    space = len(call["lengths"])
    return (("b",), *((space_factor(d),) for d in range(space)), ("h",), (last,))


def _windows(call: OpCall) -> list[NeighborhoodWindow]:
    """One per dim of space."""
    lists = (call[name] for name in ("lengths", "kernel_size", "dilation", "is_causal"))
    return [NeighborhoodWindow(*each) for each in zip(*lists, strict=True)]


def _seen(call: OpCall, tensors: Sequence[int]) -> dict[tuple[int, int], NeighborhoodWindow]:
    """The dims of space of `tensors`, counted through operands and results."""
    return {(t, 1 + d): window for t in tensors for d, window in enumerate(_windows(call))}


def _localize(call: OpCall) -> Localize:
    """Say where this rank's queries and keys lie in the whole."""
    windows, lengths = _windows(call), call["lengths"]

    def localize(ctx: LocalContext) -> fx.Node:
        site = Site(ctx, 1, windows, lengths, lengths)
        if not site.split:
            return again(ctx)
        queries, keys = ([part(d)[0] for d in range(len(windows))] for part in (site.results, site.reads))
        return again(ctx, first_query=queries, first_key=keys)

    return localize
