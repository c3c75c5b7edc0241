"""Emitting halos: what windows read of other ranks' shards, and what they add to them.

The table of messages follows from the layouts: from any distance, of any sizes, to empty shards too. Only what is
foreign travels; several split dims go one after the other, the second with what the first has brought, so that
corners arrive without messages of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from passes.layout import Span
from passes.redistribution.emit import value
from passes.redistribution.pieces import flatten_pieces
from passes.redistribution.site import Site, without
from passes.redistribution.splits import foreign_elements
from passes.redistribution.steps import HaloExchange, HaloReduce

__all__ = ["halo_exchange", "halo_reduce"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def halo_exchange(site: Site, x: fx.Node) -> fx.Node:
    """What others hold of my span, put around what I hold of it."""
    step: HaloExchange = site.step
    pieces = _pieces(site, x)
    if not math.prod(site.result_shape):
        return site.emit.empty(x, site.result_shape)
    return site.emit.cat([piece for _, piece in pieces], step.dim)


def halo_reduce(site: Site, x: fx.Node) -> fx.Node:
    """My part of the sum: my own summand, and those of others that reach into it."""
    step: HaloReduce = site.step
    pieces = _pieces(site, x)
    if not pieces:
        return site.emit.call(aten.new_zeros.default, x, list(site.result_shape))
    first, _ = site.span(step.after, step.dim)
    whole = [_placed(site, piece, lo - first) for lo, piece in pieces]
    total = whole[0]
    for other in whole[1:]:
        total = site.emit.call(aten.add.Tensor, total, other)
    return total


def _pieces(site: Site, x: fx.Node) -> list[tuple[int, fx.Node]]:
    """(first place, piece) of all that others send, and of what is here already, by place."""
    dim = site.step.dim
    sent, received = site.messages(dim)
    start, _ = site.span(site.step.before, dim)
    lo, hi = received[site.ranks.index(site.rank)]
    pieces = _foreign(site, x, sent, received)
    if lo < hi:
        pieces.append((lo, site.emit.slice(x, dim, lo - start, hi - start)))
    return sorted(pieces, key=lambda item: item[0])


def _foreign(
    site: Site, x: fx.Node, sent: Sequence[Span], received: Sequence[Span]
) -> list[tuple[int, fx.Node]]:
    """Send each other rank of the group its span of `site.step.dim`: (first place, piece) of what arrives.

    sent, received: per rank of the group, in global coordinates; the own entry stays here.
    """
    dim, place = site.step.dim, site.ranks.index(site.rank)
    others = [span if i != place else (0, 0) for i, span in enumerate(sent)]
    arriving = [span if i != place else (0, 0) for i, span in enumerate(received)]
    if not _anything_foreign(site):
        return []
    width = math.prod(without(tuple(value(x).shape), dim))
    out_numel, in_numel = ([(hi - lo) * width for lo, hi in spans] for spans in (others, arriving))
    start, _ = site.span(site.step.before, dim)
    flat = flatten_pieces(site.emit, x, dim, [(lo - start, hi - start) for lo, hi in others if lo < hi])
    target = c10d.all_to_all_single.default
    arrived = site.emit.collective(target, flat, [sum(in_numel)], in_numel, out_numel, site.group_name)
    pieces: list[tuple[int, fx.Node]] = []
    first = 0
    for (lo, hi), count in zip(arriving, in_numel, strict=True):
        if count:
            shape = list(value(x).shape)
            shape[dim] = hi - lo
            pieces.append((lo, site.emit.view(site.emit.slice(arrived, 0, first, first + count), shape)))
            first += count
    return pieces


def _anything_foreign(site: Site) -> bool:
    """Whether any rank of the group sends anything: all of its ranks know."""
    dim = site.step.dim
    if not math.prod(without(site.step.before.local_shape(site.shape, site.mesh, site.rank), dim)):
        return False
    held = [site.span(site.step.before, dim, rank) for rank in site.ranks]
    wanted = [site.span(site.step.after, dim, rank) for rank in site.ranks]
    return foreign_elements(held, wanted) > 0


def _placed(site: Site, piece: fx.Node, start: int) -> fx.Node:
    """`piece` at `start` of the result's dim, zeros around it."""
    dim, shape = site.step.dim, value(piece).shape
    after = site.result_shape[dim] - start - shape[dim]
    if not start and not after:
        return piece
    sides = [0, 0] * (len(shape) - 1 - dim) + [start, after]
    return site.emit.call(aten.constant_pad_nd.default, piece, sides, 0)
