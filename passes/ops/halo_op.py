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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.layout.layout import Halo, Layout, Span, spans_of
from passes.ops.named_collective import NAMED
from passes.redistribution.emit_steps import Emitter
from passes.redistribution.halo_steps import HaloSite, halo_exchange, halo_reduce
from passes.redistribution.steps import HaloExchange, HaloReduce


class AtOnce(Emitter):
    """Runs what it would emit, on tensors."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def cat(self, pieces: Sequence[Any], dim: int) -> Any:
        """A copy of one, too: the result of an op shares no memory with its operand."""
        return torch.cat(list(pieces), dim)

    def waited(self, target: Any, x: Any, shape: Sequence[int], args: Sequence[Any]) -> Any:
        return torch.ops._c10d_functional.wait_tensor(NAMED[target](x, *args, "halo"))


_SCHEMA = "(Tensor x, int dim, int[] sizes, int[] spans, bool periodic, int rank, str group_name) -> Tensor"
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
    torch.bool,
)
"""What gloo and NCCL both send; booleans as bytes."""


@dataclass(frozen=True)
class _Halo:
    """One of the two ops. transpose: the other."""

    name: str
    transpose: str
    step: type[HaloExchange | HaloReduce]
    combined: Callable[[HaloSite, Any], Any]

    def __call__(
        self, x: Tensor, dim: int, sizes: Any, spans: Any, periodic: bool, rank: int, group_name: str
    ) -> Tensor:
        held, wanted = _table(self.name, tuple(sizes), tuple(spans), periodic)
        sums = self.step is HaloReduce
        _check_rank(self.name, sizes, rank)
        dim = _checked_dim(self.name, x, dim, (wanted if sums else held)[rank], rank)
        if sums and x.dtype == torch.bool:
            raise ShardingError(f"{self.name}: x is torch.bool, which has no sum\n  try: an integer dtype")
        of_dim = lambda one, none: tuple(one if d == dim else none for d in range(x.ndim))
        axes = of_dim(("group",), ())
        ends = (
            Layout(axes, (), of_dim(tuple(sizes), None)),
            Layout(axes, halos=of_dim(Halo(wanted, sums), None)),
        )
        before, after = reversed(ends) if sums else ends
        step = self.step(before=before, after=after, axes=("group",), dim=dim)
        shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
        groups = {("group",): group_name}
        site = HaloSite(AtOnce(fx.Graph(), {}), step, shape, MeshSpec({"group": len(held)}), rank, groups)
        return self.combined(site, x)


@lru_cache(maxsize=1024)
def _table(
    op: str, sizes: tuple[int, ...], spans: tuple[int, ...], periodic: bool
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """What is held and wanted of the dim, per rank. Raises ShardingError if the arguments contradict each other."""
    if min(sizes, default=0) < 0:
        raise ShardingError(f"{op}: sizes {list(sizes)} has a negative part\n  try: 0 for an empty one")
    if len(spans) != 2 * len(sizes):
        raise ShardingError(
            f"{op}: spans has {len(spans)} numbers for {len(sizes)} sizes\n"
            "  try: [lo, hi] of each rank, one after the other: two numbers a rank"
        )
    length = sum(sizes)
    wanted = tuple(zip(spans[::2], spans[1::2], strict=True))
    for rank, (lo, hi) in enumerate(wanted):
        _check_span(op, f"the span [{lo}, {hi}) of rank {rank}", (lo, hi), length, periodic)
    return spans_of(sizes), wanted


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
    _Halo("halo_exchange", "halo_reduce", HaloExchange, halo_exchange),
    _Halo("halo_reduce", "halo_exchange", HaloReduce, halo_reduce),
):
    torch.library.define(f"autoshard::{_halo.name}", _SCHEMA)
    torch.library.impl(f"autoshard::{_halo.name}", "CompositeImplicitAutograd", _composite(_halo))
