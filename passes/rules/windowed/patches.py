"""Patches and neighbourhoods: batch, channels and heads split; space is split by the patches, or by the queries.

Where patches are flattened into one dim, rows before columns, rows of patches are split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from passes.layout.layout import Span
from passes.layout.windows import SlidingWindow
from passes.rules.core.assemble import again, argument, empty_safe, rule_of, whole_rule
from passes.rules.core.rule import Dim, LocalContext, Localize, OpCall, OpRule
from passes.rules.windowed.windowed import (
    Site,
    pad_space,
    per_dim,
    space_dims,
    space_factor,
    unpad_space,
    windows_of,
)


@dataclass(frozen=True)
class NeighborhoodWindow:
    """Neighbourhood attention: query i reads `kernel` keys, every `dilation`-th, about itself, moved inside at edges;
    causal: itself and those before it, as many as there are.   [NATTEN; see passes/ops/attention_window.py]

    kernel * dilation <= length.
    """

    length: int
    kernel: int
    dilation: int = 1
    is_causal: bool = False

    def ends(self, query: int) -> Span:
        """First key that `query` reads, and one past its last."""
        at, group = divmod(query, self.dilation)
        if self.is_causal:
            return group + self.dilation * max(0, at - self.kernel + 1), query + 1
        positions = -(-(self.length - group) // self.dilation)
        start = group + self.dilation * min(max(0, at - self.kernel // 2), positions - self.kernel)
        return start, start + self.dilation * (self.kernel - 1) + 1

    def reads(self, lo: int, hi: int) -> Span:
        """Among queries of one dilation group no later one reads earlier: one query of each group decides."""
        if lo >= hi:
            return 0, 0
        first = min(self.ends(i)[0] for i in range(lo, min(hi, lo + self.dilation)))
        return first, max(self.ends(i)[1] for i in range(max(lo, hi - self.dilation), hi))


_SPACE = 2


@empty_safe
def patches(call: OpCall) -> OpRule:
    """im2col: ... c window(y0) window(y1) -> ... (c k) (y0 y1); k: whole"""
    return _patches(call, plane=0)


@empty_safe
def patches_back(call: OpCall) -> OpRule:
    """col2im: ... (c k) (y0 y1) -> ... c window(y0) window(y1); k: whole. What patches add to an element is summed."""
    return _patches(call, plane=1)


def _patches(call: OpCall, plane: int) -> OpRule:
    """plane: which is the plane, the operand (0) or the result (1)."""
    shape = call.shapes[plane]
    windows, counts = _geometry(call, shape)
    dims = space_dims(len(shape), _SPACE)
    channel = len(shape) - _SPACE - 1
    rows: Dim = tuple(space_factor(d) for d in range(_SPACE))
    columns = (*dims[:channel], (*dims[channel], "k"), rows)
    kernel = math.prod(per_dim(call["kernel_size"], _SPACE))
    tensors, localize = ([dims, columns], _take) if plane == 0 else ([columns, dims], _put)
    return rule_of(
        call,
        tensors[:1],
        tensors[1:],
        sizes={"k": kernel, **dict(zip(rows, counts, strict=True))},
        whole=["k"],
        linear="self",
        windows={(plane, channel + 1 + d): window for d, window in enumerate(windows)},
        localize=lambda ctx: localize(Site(ctx, channel + 1, windows, shape[-_SPACE:], counts)),
    )


def _geometry(call: OpCall, shape: tuple[int, ...]) -> tuple[list[SlidingWindow], list[int]]:
    """Per dim of a plane of `shape` its window, and how many patches there are."""
    lists = (call[name] for name in ("kernel_size", "stride", "dilation", "padding"))
    windows = windows_of(SlidingWindow, shape[-_SPACE:], *lists)
    spans = [w.length + 2 * w.before - w.dilation * (w.kernel - 1) - 1 for w in windows]
    return windows, [span // w.stride + 1 for span, w in zip(spans, windows, strict=True)]


def _sides(site: Site[SlidingWindow]) -> tuple[list[tuple[int, int]], list[int]]:
    """Per dim what to pad this rank's part of a plane with, and what the op still pads itself."""
    split, windows = site.split, site.windows
    padding = [w.padding(*site.results(d)) if d in split else (0, 0) for d, w in enumerate(windows)]
    return padding, [0 if d in split else w.before for d, w in enumerate(windows)]


def _take(site: Site[SlidingWindow]) -> fx.Node:
    ctx, (sides, padding) = site.ctx, _sides(site)
    return again(ctx, self=pad_space(ctx, argument(ctx, "self"), sides), padding=padding)


def _put(site: Site[SlidingWindow]) -> fx.Node:
    ctx, (sides, padding) = site.ctx, _sides(site)
    sizes = [n + sum(side) for n, side in zip(site.input_lengths, sides, strict=True)]
    return unpad_space(ctx, again(ctx, output_size=sizes, padding=padding), sides)


@empty_safe
def windows_along(call: OpCall) -> OpRule:
    """Tensor.unfold: a window(y) b -> a y b k; k: whole"""
    source = call.tensor("self")
    if source.ndim == 0:
        return whole_rule(call)
    return _along(call, source.shape, call["dimension"], plane=0)


@empty_safe
def windows_along_back(call: OpCall) -> OpRule:
    """unfold_backward: a y b k -> a window(y) b; k: whole"""
    if call.result.ndim == 0:
        return whole_rule(call)
    return _along(call, call.result.shape, call["dim"], plane=1)


def _along(call: OpCall, shape: tuple[int, ...], dim: int, plane: int) -> OpRule:
    """plane: which has the dim that windows run along, the operand (0) or the result (1)."""
    dim %= len(shape)
    dims: list[Dim] = [space_dims(1, 1)[0] if d == dim else (f"d{d}",) for d in range(len(shape))]
    tensors = [dims, [*dims, ("k",)]] if plane == 0 else [[*dims, ("k",)], dims]
    return rule_of(
        call,
        tensors[:1],
        tensors[1:],
        whole=["k"],
        linear="self" if plane == 0 else "grad_in",
        windows={(plane, dim): SlidingWindow(shape[dim], int(call["size"]), int(call["step"]))},
        localize=None if plane == 0 else lambda ctx: again(ctx, input_sizes=ctx.result_shape()),
    )


@empty_safe
def neighborhood_attention(call: OpCall) -> OpRule:
    """b *y h d, b *window(y) h d, b *window(y) h e -> b *y h e; d: whole; e: whole"""
    queries, values = _neighborhood_dims(call, "d"), _neighborhood_dims(call, "e")
    return rule_of(
        call,
        [queries, queries, values],
        [values],
        whole=("d", "e"),
        windows=_seen(call, (1, 2)),
        localize=_placed(call),
    )


@empty_safe
def neighborhood_attention_backward(call: OpCall) -> OpRule:
    """b *y h e, b *y h d, b *window(y) h d, b *window(y) h e -> b *y h d, b *window(y) h d, b *window(y) h e

    d: whole; e: whole
    """
    queries, values = _neighborhood_dims(call, "d"), _neighborhood_dims(call, "e")
    return rule_of(
        call,
        [values, queries, queries, values],
        [queries, queries, values],
        whole=("d", "e"),
        linear="grad_out",
        windows=_seen(call, (2, 3, 5, 6)),
        localize=_placed(call),
    )


def _neighborhood_dims(call: OpCall, last: str) -> tuple[Dim, ...]:
    space = len(call["lengths"])
    return (("b",), *((space_factor(d),) for d in range(space)), ("h",), (last,))


def _neighborhoods(call: OpCall) -> list[NeighborhoodWindow]:
    """One per dim of space."""
    lists = (call[name] for name in ("lengths", "kernel_size", "dilation", "is_causal"))
    return [NeighborhoodWindow(*each) for each in zip(*lists, strict=True)]


def _seen(call: OpCall, tensors: Sequence[int]) -> dict[tuple[int, int], NeighborhoodWindow]:
    """The dims of space of `tensors`, counted through operands and results."""
    return {(t, 1 + d): window for t in tensors for d, window in enumerate(_neighborhoods(call))}


def _placed(call: OpCall) -> Localize:
    """Say where this rank's queries and keys lie in the whole."""
    windows, lengths = _neighborhoods(call), call["lengths"]

    def localize(ctx: LocalContext) -> fx.Node:
        site = Site(ctx, 1, windows, lengths, lengths)
        if not site.split:
            return again(ctx)
        queries, keys = ([part(d)[0] for d in range(len(windows))] for part in (site.results, site.reads))
        return again(ctx, first_query=queries, first_key=keys)

    return localize
