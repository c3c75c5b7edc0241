"""`autoshard::halo_exchange` and its transpose, for code that is parallel by hand.

    halo_exchange(x, dim, sizes, spans, periodic, rank, group_name) -> Tensor
    halo_reduce  (x, dim, sizes, spans, periodic, rank, group_name) -> Tensor

Rank r of the group holds the r-th of the parts of `dim` that `sizes` cut it into; after the exchange it holds [lo, hi)
of the whole dim, `spans[2 r : 2 r + 2]`. The reduction goes back: summands of the spans are added up to the parts. Each
is the gradient of the other. Only rows of other ranks travel, in one all-to-all.

sizes:    of all ranks; empty parts too. x has `sizes[rank]` of `dim` (to reduce: hi - lo); its other dims are
          the same on all ranks of the group.
spans:    of all ranks, flat: lo and hi of each; near or far, empty, with or without the own part.
periodic: spans may reach beyond [0, sum(sizes)) by up to one length to either side, and wrap around.
rank:     this process's in the group. An argument, so that caches of compiled code tell the ranks apart.

Composites of plain ATen ops and a functional all-to-all: compilers fuse the packing and keep the order of collectives
as of any other. ShardingError for what does not fit; but for x's own shape it follows from what all ranks know, so
that they refuse alike, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cost_model.errors import ShardingError
from passes.layout.layout import Span, spans_of
from passes.ops.named_collective import NAMED_BY_NAME
from passes.redistribution.halo_steps import Traffic, exchange_traffic, reduce_traffic


class Arrived(NamedTuple):
    """A piece of the result and its local span there."""

    span: Span
    piece: Tensor


def row_numel(x: Tensor, dim: int) -> int:
    """Elements of one row of `dim`."""
    return math.prod((*x.shape[:dim], *x.shape[dim + 1 :]))


def split_sizes(spans: Sequence[Sequence[Span]], row: int, rank: int) -> list[int]:
    """Elements that travel to (or from) each rank; of the own spans none do."""
    return [0 if r == rank else row * sum(hi - lo for lo, hi in of) for r, of in enumerate(spans)]


def pack(x: Tensor, dim: int, traffic: Traffic, rank: int) -> Tensor:
    """All that leaves this rank, flat, in the order of receivers."""
    leaving = [span for r, spans in enumerate(traffic.sent) if r != rank for span in spans]
    flat = [x.narrow(dim, lo, hi - lo).reshape(-1) for lo, hi in leaving]
    return torch.cat(flat) if flat else x.new_empty(0)


def unpack(flat: Tensor, x: Tensor, dim: int, traffic: Traffic, rank: int) -> list[Arrived]:
    """All pieces of the result, those of the operand `x` that stay here among them, in the order of senders."""
    found: list[Arrived] = []
    first, row = 0, row_numel(x, dim)
    for sender, spans in enumerate(traffic.received):
        if sender == rank:
            kept = zip(spans, traffic.sent[rank], strict=True)
            found += [Arrived(span, x.narrow(dim, lo, hi - lo)) for span, (lo, hi) in kept]
            continue
        for span in spans:
            size = span[1] - span[0]
            piece = flat.narrow(0, first, size * row)
            found.append(Arrived(span, piece.view([*x.shape[:dim], size, *x.shape[dim + 1 :]])))
            first += size * row
    return found


def put_together(found: Sequence[Arrived], x: Tensor, dim: int, traffic: Traffic) -> Tensor:
    """The result of an exchange: its pieces side by side."""
    if not found:
        return x.new_empty(_result_shape(x, dim, traffic))
    return torch.cat([piece for _, piece in sorted(found, key=lambda arrived: arrived.span)], dim)


def add_up(found: Sequence[Arrived], x: Tensor, dim: int, traffic: Traffic) -> Tensor:
    """The result of a reduction: every piece added where it belongs."""
    rest = list(found)
    first = next((i for i, arrived in enumerate(found) if arrived.span == (0, traffic.length)), None)
    if first is None:
        total = x.new_zeros(_result_shape(x, dim, traffic))
    else:
        total = rest.pop(first).piece.clone(memory_format=torch.contiguous_format)
    for (lo, hi), piece in rest:
        total.narrow(dim, lo, hi - lo).add_(piece)
    return total


def _result_shape(x: Tensor, dim: int, traffic: Traffic) -> list[int]:
    return [*x.shape[:dim], traffic.length, *x.shape[dim + 1 :]]


_SCHEMA = "(Tensor x, int dim, int[] sizes, int[] spans, bool periodic, int rank, str group_name) -> Tensor"
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
    torch.bool,
)
"""What gloo and NCCL both send; booleans as bytes."""


@dataclass(frozen=True)
class _Table:
    """What is held and wanted of a dim of `length`, per rank."""

    held: tuple[Span, ...]
    wanted: tuple[Span, ...]
    length: int


@dataclass(frozen=True)
class _Halo:
    """One of the two ops. transpose: the other. given: what its operand is of the table, per rank."""

    name: str
    transpose: str
    given: Literal["held", "wanted"]
    traffic: Callable[..., Traffic]
    combined: Callable[..., Tensor]
    sums: bool

    def __call__(
        self, x: Tensor, dim: int, sizes: Any, spans: Any, periodic: bool, rank: int, group_name: str
    ) -> Tensor:
        table = _table(self.name, tuple(sizes), tuple(spans), periodic)
        _check_rank(self.name, sizes, rank)
        dim = _checked_dim(self.name, x, dim, getattr(table, self.given)[rank], rank)
        if self.sums and x.dtype == torch.bool:
            raise ShardingError(f"{self.name}: x is torch.bool, which has no sum\n  try: an integer dtype")
        traffic = self.traffic(table.held, table.wanted, table.length, rank)
        swapped = _all_to_all(x, dim, traffic, rank, group_name)
        return self.combined(unpack(swapped, x, dim, traffic, rank), x, dim, traffic)


def _all_to_all(x: Tensor, dim: int, traffic: Traffic, rank: int, group_name: str) -> Tensor:
    """What the other ranks send to this one, flat. Whether there is anything to send is the same on all ranks."""
    row = row_numel(x, dim)
    if not traffic.foreign or not row:
        return x.new_empty(0)
    leaving, arriving = (split_sizes(spans, row, rank) for spans in (traffic.sent, traffic.received))
    flat = pack(x, dim, traffic, rank)
    if x.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    started = NAMED_BY_NAME["all_to_all_single"](flat, arriving, leaving, group_name, "halo")
    return torch.ops._c10d_functional.wait_tensor(started).to(x.dtype)


@lru_cache(maxsize=1024)
def _table(op: str, sizes: tuple[int, ...], spans: tuple[int, ...], periodic: bool) -> _Table:
    """The table of these arguments. Raises ShardingError if they contradict each other."""
    if min(sizes, default=0) < 0:
        raise ShardingError(f"{op}: sizes {list(sizes)} has a negative part\n  try: 0 for an empty one")
    if len(spans) != 2 * len(sizes):
        raise ShardingError(
            f"{op}: spans has {len(spans)} numbers for {len(sizes)} sizes\n"
            "  try: [lo, hi] of each rank, one after the other: two numbers a rank"
        )
    length = sum(sizes)
    held = spans_of(sizes)
    wanted = tuple(zip(spans[::2], spans[1::2], strict=True))
    for rank, (lo, hi) in enumerate(wanted):
        _check_span(op, f"the span [{lo}, {hi}) of rank {rank}", (lo, hi), length, periodic)
    return _Table(held, wanted, length)


def _check_span(op: str, what: str, span: Span, length: int, periodic: bool) -> None:
    lo, hi = span
    if lo > hi:
        raise ShardingError(f"{op}: {what} ends before it starts\n  try: lo <= hi; lo == hi is empty")
    if lo == hi:
        return
    if not periodic and (lo < 0 or hi > length):
        raise ShardingError(
            f"{op}: {what} leaves the dim, [0, {length})\n  try: clip it, or periodic=True to wrap around"
        )
    if lo < -length or hi > 2 * length:
        raise ShardingError(
            f"{op}: {what} wraps around a periodic dim of {length} more than once\n"
            f"  try: a halo of at most {length} to either side"
        )


def _check_rank(op: str, sizes: Sequence[int], rank: int) -> None:
    """That the group has as many ranks as there are sizes its backend checks: a name says nothing about a group."""
    if not 0 <= rank < len(sizes):
        raise ShardingError(
            f"{op}: rank is {rank}, but sizes has parts for {len(sizes)} ranks\n"
            "  try: torch.distributed.get_rank(group), and a size for each rank, 0 where it holds nothing"
        )


def _checked_dim(op: str, x: Tensor, dim: int, span: Span, rank: int) -> int:
    """`dim` counted from the front. Raises ShardingError for an operand that does not fit."""
    if not -x.ndim <= dim < x.ndim:
        raise ShardingError(f"{op}: dim is {dim}, but x has {x.ndim} dims")
    if x.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ShardingError(f"{op}: x is {x.dtype}, which is not sent\n  try: one of {known}")
    size = span[1] - span[0]
    if x.shape[dim] != size:
        raise ShardingError(
            f"{op}: x has {x.shape[dim]} rows in dim {dim}; by the arguments rank {rank} holds {size}"
        )
    return dim % x.ndim


def _composite(halo: _Halo) -> Callable[..., Tensor]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *where: Any) -> Tensor:
            ctx.where = where
            return halo(x, *where)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
            transpose = getattr(torch.ops.autoshard, halo.transpose)
            return transpose(*grad_outputs, *ctx.where), *(None for _ in ctx.where)

    return lambda *arguments: Function.apply(*arguments)  # type: ignore[return-value]


for _halo in (
    _Halo("halo_exchange", "halo_reduce", "held", exchange_traffic, put_together, sums=False),
    _Halo("halo_reduce", "halo_exchange", "wanted", reduce_traffic, add_up, sums=True),
):
    torch.library.define(f"autoshard::{_halo.name}", _SCHEMA)
    torch.library.impl(f"autoshard::{_halo.name}", "CompositeImplicitAutograd", _composite(_halo))
