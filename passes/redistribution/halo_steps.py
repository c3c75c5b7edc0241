"""Halos: who sends what to whom when spans held of a dim become spans wanted of it, and what one rank emits for it.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout, Span, laps
from passes.redistribution.emit_steps import Emitter, flatten_pieces, value


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
