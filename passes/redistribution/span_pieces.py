"""Cutting a local tensor into the pieces a collective wants in a row, and putting pieces together.

A *span* is a half-open range of one local dim. Where pieces have equal sizes, a row of them is one
view-permute-copy, however many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from passes.layout.layout import Span
from passes.redistribution.emit_steps import Emitter, value

__all__ = [
    "flatten_pieces",
    "pad_parts",
    "stack_parts",
    "trim_parts",
    "unflatten_pieces",
    "unstack_parts",
]


def stack_parts(emit: Emitter, x: fx.Node, dim: int, counts: Sequence[int], order: Sequence[int]) -> fx.Node:
    """Cut `dim` into prod(counts) equal parts and stack them along dim 0.

    counts: ranks along each axis of the group, as the layout nests them, major first; order: the
    positions among them in group order.   [a, n*s, b] -> [n*a, s, b]
    """
    shape = list(value(x).shape)
    size = shape[dim] // math.prod(counts)
    part = [*shape[:dim], size, *shape[dim + 1 :]]
    n = len(counts)
    if dim == 0 and list(order) == sorted(order):
        return emit.contiguous(x)
    cut = emit.view(x, [*shape[:dim], *counts, size, *shape[dim + 1 :]])
    where = [dim + axis for axis in order]
    rest = [i for i in range(len(shape) + n) if not dim <= i < dim + n]
    stacked = emit.contiguous(emit.permute(cut, where + rest))
    return emit.view(stacked, [math.prod(counts) * part[0], *part[1:]])


def unstack_parts(
    emit: Emitter, x: fx.Node, dim: int, counts: Sequence[int], order: Sequence[int], part: Sequence[int]
) -> fx.Node:
    """The inverse of `stack_parts`; `part`: shape of one part.   [n*a, s, b] -> [a, n*s, b]"""
    whole = [*part[:dim], math.prod(counts) * part[dim], *part[dim + 1 :]]
    if dim == 0 and list(order) == sorted(order):
        return x
    n = len(counts)
    stacked = emit.view(x, [*(counts[axis] for axis in order), *part])
    back = [list(order).index(axis) for axis in range(n)]
    before, after = range(n, n + dim), range(n + dim, n + len(part))
    return emit.view(emit.contiguous(emit.permute(stacked, [*before, *back, *after])), whole)


def pad_parts(emit: Emitter, x: fx.Node, dim: int, sizes: Sequence[int]) -> fx.Node:
    """Make the parts of `dim`, of given `sizes`, all as long as the longest."""
    longest = max(sizes)
    pieces: list[fx.Node] = []
    for run in _full_runs(sizes, longest):
        piece = emit.slice(x, dim, run.start, run.start + run.length)
        pieces.append(emit.pad(piece, dim, run.parts * longest))
    return emit.cat(pieces, dim)


def trim_parts(emit: Emitter, x: fx.Node, dim: int, sizes: Sequence[int]) -> fx.Node:
    """The inverse of `pad_parts`."""
    longest = max(sizes)
    pieces: list[fx.Node] = []
    first = 0
    for run in _full_runs(sizes, longest):
        if run.length:
            pieces.append(emit.slice(x, dim, first * longest, first * longest + run.length))
        first += run.parts
    return emit.contiguous(emit.cat(pieces, dim))


def flatten_pieces(emit: Emitter, x: fx.Node, dim: int, spans: Sequence[Span]) -> fx.Node:
    """One flat tensor: the given pieces of `dim`, each flattened, one after the other."""
    flat: list[fx.Node] = []
    shape = tuple(value(x).shape)
    for run in _runs(spans, keep_sizes=math.prod(shape[:dim]) > 1):
        piece = emit.slice(x, dim, run.lo, run.hi)
        if run.count > 1:
            size = (run.hi - run.lo) // run.count
            cut = emit.view(piece, [*shape[:dim], run.count, size, *shape[dim + 1 :]])
            rest = [i for i in range(len(shape) + 1) if i != dim]
            piece = emit.permute(cut, [dim, *rest])
        flat.append(emit.view(emit.contiguous(piece), [math.prod(value(piece).shape)]))
    return emit.cat(flat, 0) if flat else emit.empty(x, [0])


def unflatten_pieces(
    emit: Emitter, flat: fx.Node, dim: int, spans: Sequence[Span], shape: Sequence[int]
) -> fx.Node:
    """The inverse: a tensor of `shape` from the flat pieces that fill its `dim`, in any order."""
    found: list[tuple[int, fx.Node]] = []
    others = math.prod(shape) // shape[dim] if shape[dim] else 0
    start = 0
    for run in _runs(spans, keep_sizes=math.prod(shape[:dim]) > 1):
        length = run.hi - run.lo
        piece = emit.slice(flat, 0, start, start + length * others)
        start += length * others
        size = length // run.count
        cut = emit.view(piece, [run.count, *shape[:dim], size, *shape[dim + 1 :]])
        moved = emit.permute(cut, [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)])
        whole = [*shape[:dim], length, *shape[dim + 1 :]]
        found.append((run.lo, emit.view(emit.contiguous(moved), whole)))
    if not found:
        return emit.empty(flat, shape)
    return emit.cat([piece for _, piece in sorted(found, key=lambda item: item[0])], dim)


@dataclass(frozen=True)
class _FullRun:
    """`parts` parts in a row: full ones, one shorter, then empty ones. `length` elements."""

    start: int
    parts: int
    length: int


def _full_runs(sizes: Sequence[int], longest: int) -> list[_FullRun]:
    """Fewest runs in which only the end needs padding: torch.chunk's sizes make one."""
    runs: list[_FullRun] = []
    for size in sizes:
        last = runs[-1] if runs else None
        if last is not None and (last.length == last.parts * longest or size == 0):
            runs[-1] = _FullRun(last.start, last.parts + 1, last.length + size)
        else:
            start = last.start + last.length if last is not None else 0
            runs.append(_FullRun(start, 1, size))
    return runs


@dataclass(frozen=True)
class _Run:
    """`count` adjacent pieces of equal size that fill [lo, hi)."""

    lo: int
    hi: int
    count: int


def _runs(spans: Sequence[Span], keep_sizes: bool) -> list[_Run]:
    """Non-empty spans in order, adjacent ones merged where the data of both lies in a row.

    keep_sizes: whether the pieces must be told apart (they must unless all dims before are 1).
    """
    runs: list[_Run] = []
    for lo, hi in spans:
        if lo >= hi:
            continue
        last = runs[-1] if runs else None
        if last is not None and last.hi == lo and not keep_sizes:
            runs[-1] = _Run(last.lo, hi, 1)
        elif last is not None and last.hi == lo and (last.hi - last.lo) == last.count * (hi - lo):
            runs[-1] = _Run(last.lo, hi, last.count + 1)
        else:
            runs.append(_Run(lo, hi, 1))
    return runs
