"""Emitting plain ATen nodes and functional collectives, every one with its meta and value; cutting a local tensor into
the pieces a collective wants in a row, and putting pieces together.

A *span* is a half-open range of one local dim. Where pieces have equal sizes, a row of them is one view-permute-copy,
however many there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.ir.joint import FakeCalls
from passes.layout.layout import Span
from passes.ops.collective_ops import exchange_rows

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

COLLECTIVES = (
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
    c10d.all_to_all_single.default,
    exchange_rows,
)


WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""Integers that no backend sends, and as what they travel."""
_SENT_AS = {torch.bool: torch.uint8, **WIDER}


def value(node: fx.Node | torch.Tensor) -> torch.Tensor:
    """The node's fake (or meta) tensor: this rank's shape, strides and dtype."""
    return node if isinstance(node, torch.Tensor) else node.meta["val"]


@dataclass(frozen=True)
class Emitter:
    """Appends nodes at the graph's insertion point. meta: copied to each, then "val" is set, by `calls`.

    The helpers emit nothing where nothing is to be done.
    """

    graph: fx.Graph
    meta: Mapping[str, Any]
    calls: FakeCalls = field(default_factory=FakeCalls)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.named(target, self.calls(target, args, kwargs), args, kwargs)

    def named(self, target: Any, result: torch.Tensor, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta.update(self.meta)
        node.meta["val"] = result
        return node

    def collective(self, target: Any, x: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """`target(x, *args)` and the wait for it; `shape`: of the result.

        Booleans travel as bytes: no backend reduces them, and not every one gathers them; floats of 8 bits likewise,
        which are never reduced. Integers that no backend sends are wider on their way. Complex numbers travel as pairs
        of real ones, a last dim: not every backend sends them (gloo: all-to-all).
        """
        if value(x).is_floating_point() and value(x).itemsize == 1:
            sent = self.call(aten.view.dtype, self.contiguous(x), torch.uint8)
            return self.call(aten.view.dtype, self.collective(target, sent, shape, *args), value(x).dtype)
        if (wire := _SENT_AS.get(value(x).dtype)) is not None:
            sent = self.call(aten._to_copy.default, x, dtype=wire)
            received = self.collective(target, sent, shape, *args)
            return self.call(aten._to_copy.default, received, dtype=value(x).dtype)
        if value(x).is_complex():
            return self._complex_collective(target, x, shape, *args)
        return self.waited(target, self.contiguous(x), shape, args)

    def waited(self, target: Any, x: fx.Node, shape: Sequence[int], args: Sequence[Any]) -> fx.Node:
        result = self.calls(aten.new_empty.default, (x, list(shape)), {})
        started = self.named(target, result, (x, *args), {})
        return self.named(c10d.wait_tensor.default, result, (started,), {})

    def _complex_collective(self, target: Any, x: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """An input may be a conjugate that torch has only noted, which has no real view until it is computed."""
        x = self.call(aten.resolve_conj.default, self.contiguous(x))
        sent = self.call(aten.view_as_real.default, x)
        received = self.collective(target, sent, (*shape, 2), *args)
        # In a bucket it may come to lie at an odd offset, where a pair is no complex number.
        pairs = self.call(aten.clone.default, received, memory_format=torch.contiguous_format)
        return self.call(aten.view_as_complex.default, pairs)

    def contiguous(self, x: fx.Node) -> fx.Node:
        if value(x).is_contiguous():
            return x
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Legal where `x` is contiguous, or where `shape` only splits dims of it."""
        if tuple(value(x).shape) == tuple(shape):
            return x
        return self.call(aten.view.default, x, list(shape))

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return x
        return self.call(aten.permute.default, x, list(order))

    def slice(self, x: fx.Node, dim: int, lo: int, hi: int) -> fx.Node:
        if (lo, hi) == (0, value(x).shape[dim]):
            return x
        return self.call(aten.slice.Tensor, x, dim, lo, hi)

    def pad(self, x: fx.Node, dim: int, length: int) -> fx.Node:
        """Zeros at the end of `dim`, up to `length`."""
        missing = length - value(x).shape[dim]
        if missing == 0:
            return x
        sides = [0, 0] * (value(x).ndim - 1 - dim) + [0, missing]
        return self.call(aten.constant_pad_nd.default, x, sides, 0)

    def cat(self, pieces: Sequence[fx.Node], dim: int) -> fx.Node:
        return pieces[0] if len(pieces) == 1 else self.call(aten.cat.default, list(pieces), dim)

    def empty(self, like: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A tensor of no elements: what a group exchanges nothing for."""
        return self.call(aten.new_zeros.default, like, list(shape))


Cuts = Mapping[int, Sequence[int]]
"""Of dims that are cut over a group's axes: of each the positions of its axes among these, as the layout nests them."""


def stack_parts(emit: Emitter, x: fx.Node, cuts: Cuts, counts: Sequence[int]) -> fx.Node:
    """Cut dims into equal parts, prod(counts) in all, and stack them along dim 0, in the order of the group.

    counts: ranks along each axis of the group, major first.   [a, n*s, b] -> [n*a, s, b]
    """
    if _in_a_row(cuts):
        return emit.contiguous(x)
    part = [size // _count(cuts, counts, d) for d, size in enumerate(value(x).shape)]
    order = _nested(cuts, len(part), len(counts))
    cut = emit.view(x, [counts[i] if i < len(counts) else part[i - len(counts)] for i in order])
    back = [order.index(i) for i in range(len(order))]
    stacked = emit.contiguous(emit.permute(cut, back))
    return emit.view(stacked, [math.prod(counts) * part[0], *part[1:]])


def unstack_parts(
    emit: Emitter, x: fx.Node, cuts: Cuts, counts: Sequence[int], part: Sequence[int]
) -> fx.Node:
    """The inverse of `stack_parts`; `part`: shape of one part.   [n*a, s, b] -> [a, n*s, b]"""
    if _in_a_row(cuts):
        return x
    stacked = emit.view(x, [*counts, *part])
    whole = emit.contiguous(emit.permute(stacked, _nested(cuts, len(part), len(counts))))
    return emit.view(whole, [size * _count(cuts, counts, d) for d, size in enumerate(part)])


def _in_a_row(cuts: Cuts) -> bool:
    """Whether parts lie one after the other in the whole, as in the stack."""
    return [*cuts] == [0] and list(cuts[0]) == sorted(cuts[0])


def _count(cuts: Cuts, counts: Sequence[int], dim: int) -> int:
    """Into how many parts a dim is cut."""
    return math.prod(counts[axis] for axis in cuts.get(dim, ()))


def _nested(cuts: Cuts, ndim: int, axes: int) -> list[int]:
    """Of [*counts, *part], the axes of each dim that is cut before it."""
    return [i for d in range(ndim) for i in (*cuts.get(d, ()), axes + d)]


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
