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

Halos: who sends what to whom when spans held of a dim become spans wanted of it, and what one rank emits for it.

    held   [0, 4) [4, 8)          wanted   [-1, 5) [3, 9)  of a periodic length 8
    rank 1 sends to rank 0:       [7, 8) to place 0 of its buffer, [4, 5) to place 5

The table of messages follows from the layouts, which all ranks know: every rank works out its own row and column of it,
and both ends of a message agree without a word. Held spans do not overlap. Wanted spans may be anything, near or far;
beyond [0, length) they wrap around, so who does not want that clips them first. Only what is remote travels; several
split dims go one after the other, the second with what the first has brought, so that corners arrive without messages
of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.layout.layout import Halo, Layout, Span, laps, spans_of
from passes.ops.collective_ops import NAMED
from passes.redistribution.emit_steps import Emitter, flatten_pieces, value
from passes.redistribution.steps import HaloExchange, HaloReduce


class Piece(NamedTuple):
    """[lo, hi) of the dim, in global coordinates within [0, length), and its first place in the receiver's buffer."""

    lo: int
    hi: int
    place: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


def pieces(held: Span, wanted: Span, length: int) -> tuple[Piece, ...]:
    """What the holder of `held` has of `wanted`, in the order of places: several pieces where `wanted` wraps around."""
    if not length:
        return ()
    met = laps(wanted, held, length)
    return tuple(Piece(lo - shift, hi - shift, lo - wanted[0]) for (lo, hi), shift in met)


@dataclass(frozen=True)
class HaloSite:
    """A step as one rank sees it."""

    emit: Emitter
    step: Any  # the Step subclass that `_EMIT` dispatched on
    shape: tuple[int, ...]
    mesh: MeshSpec
    rank: int
    groups: Mapping[tuple[str, ...], str]

    @cached_property
    def group_axes(self) -> tuple[str, ...]:
        return tuple(sorted(self.step.axes, key=self.mesh.index))

    @property
    def group_name(self) -> str:
        return self.groups[self.group_axes]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's group, in the group's order."""
        return self.mesh.group(self.rank, self.group_axes)

    @property
    def counts(self) -> list[int]:
        """Ranks along each axis of the group."""
        return [self.mesh.size(axis) for axis in self.group_axes]

    def positions(self, axes: Sequence[str]) -> list[int]:
        """Of some of the step's axes among those of the group."""
        return [self.group_axes.index(axis) for axis in axes]

    def span(self, layout: Layout, dim: int, rank: int | None = None) -> Span:
        return layout.interval(self.shape, self.mesh, dim, self.rank if rank is None else rank)

    def part_sizes(self, layout: Layout, dim: int, axes: Sequence[str] | None = None) -> tuple[int, ...]:
        """Sizes of the group's parts of `dim`, as the layout nests them: in ascending order. axes: of the step those
        that split it; None: all."""
        return _part_sizes(
            layout, self.shape, self.mesh, dim, self.rank, tuple(self.step.axes if axes is None else axes)
        )

    def overlaps(self, dim: int, sender: int, receiver: int) -> list[tuple[Span, Span]]:
        """What rank `sender` holds of what `receiver` wants of `dim`, positions modulo its length: (places in the
        sender's tensor, places in the receiver's result), in the receiver's order."""
        held, wanted = self.span(self.step.before, dim, sender), self.span(self.step.after, dim, receiver)
        return [
            ((piece.lo - held[0], piece.hi - held[0]), (piece.place, piece.place + piece.size))
            for piece in pieces(held, wanted, self.shape[dim])
        ]

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.step.after.local_shape(self.shape, self.mesh, self.rank)


@lru_cache(maxsize=4096)
def _part_sizes(
    layout: Layout, shape: tuple[int, ...], mesh: MeshSpec, dim: int, rank: int, axes: tuple[str, ...]
) -> tuple[int, ...]:
    """The same for every layer of a model, of which each asks for every rank of a group."""
    spans = (layout.interval(shape, mesh, dim, other) for other in mesh.group(rank, axes))
    return tuple(hi - lo for lo, hi in spans)


def without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


aten = torch.ops.aten
c10d = torch.ops._c10d_functional

Arrived = tuple[Span, fx.Node]
"""(places in the result, what belongs there)."""


def halo_exchange(site: HaloSite, x: fx.Node) -> fx.Node:
    """What others hold of my span, put around what I hold of it: also from one cut of a dim to another."""
    arrived, shape = _pieces(site, x), _result_shape(site, x)
    if not math.prod(shape):
        return site.emit.empty(x, shape)
    emit = replace(site.emit, meta={**site.emit.meta, "halo": True})
    return emit.cat([piece for _, piece in arrived], site.step.dim)


def halo_reduce(site: HaloSite, x: fx.Node) -> fx.Node:
    """My part of the sum: my own summand, and those of others that reach into it."""
    arrived, shape, dim = _pieces(site, x), _result_shape(site, x), site.step.dim
    ends = sorted({0, shape[dim], *itertools.chain.from_iterable(span for span, _ in arrived)})
    runs = [_sum_of(site, arrived, (lo, hi), x) for lo, hi in itertools.pairwise(ends) if lo < hi]
    return site.emit.cat(runs, dim) if runs else site.emit.empty(x, shape)


def _result_shape(site: HaloSite, x: fx.Node) -> list[int]:
    """Of `x` with what is wanted of the dim: all others stay, whatever numbers they are."""
    shape, (lo, hi) = list(value(x).shape), site.span(site.step.after, site.step.dim)
    shape[site.step.dim] = hi - lo
    return shape


def _sum_of(site: HaloSite, arrived: Sequence[Arrived], run: Span, like: fx.Node) -> fx.Node:
    """What the pieces that cover `run`, all of it, add up to there."""
    dim = site.step.dim
    shape = _result_shape(site, like)
    shape[dim] = run[1] - run[0]
    total: fx.Node | None = None
    for (lo, hi), piece in arrived:
        if lo <= run[0] and run[1] <= hi:
            part = site.emit.slice(piece, dim, run[0] - lo, run[1] - lo)
            total = part if total is None else site.emit.call(aten.add.Tensor, total, part)
    return site.emit.call(aten.new_zeros.default, like, shape) if total is None else total


def _pieces(site: HaloSite, x: fx.Node) -> list[Arrived]:
    """All that others send, and what is here already, by place."""
    dim = site.step.dim
    arrived = _foreign(site, x)
    for (lo, hi), places in site.overlaps(dim, site.rank, site.rank):
        arrived.append((places, site.emit.slice(x, dim, lo, hi)))
    return sorted(arrived, key=lambda piece: piece[0])


def _foreign(site: HaloSite, x: fx.Node) -> list[Arrived]:
    """Send each other rank of the group what it wants of `x`; what arrives."""
    if not _anything_foreign(site, x):
        return []
    dim, rank = site.step.dim, site.rank
    sent = [site.overlaps(dim, rank, other) if other != rank else [] for other in site.ranks]
    received = [site.overlaps(dim, other, rank) if other != rank else [] for other in site.ranks]
    width = math.prod(without(tuple(value(x).shape), dim))
    out_numel = [sum(hi - lo for (lo, hi), _ in message) * width for message in sent]
    in_numel = [sum(hi - lo for _, (lo, hi) in message) * width for message in received]
    flat = flatten_pieces(site.emit, x, dim, [span for message in sent for span, _ in message])
    target = c10d.all_to_all_single.default
    arrived = site.emit.collective(target, flat, [sum(in_numel)], in_numel, out_numel, site.group_name)
    placed: list[Arrived] = []
    first = 0
    for _, (lo, hi) in itertools.chain.from_iterable(received):
        shape = list(value(x).shape)
        shape[dim] = hi - lo
        count = (hi - lo) * width
        part = site.emit.slice(arrived, 0, first, first + count)
        placed.append(((lo, hi), site.emit.view(part, shape)))
        first += count
    return placed


def _anything_foreign(site: HaloSite, x: fx.Node) -> bool:
    """Whether any rank of the group sends anything: all of its ranks know."""
    dim = site.step.dim
    if not math.prod(without(tuple(value(x).shape), dim)):
        return False
    pairs = itertools.permutations(site.ranks, 2)
    return any(site.overlaps(dim, sender, receiver) for sender, receiver in pairs)


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
