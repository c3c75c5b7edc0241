"""The local halves of `autoshard::halo_exchange` and `halo_reduce`: what is sent, and what becomes of what arrives.

Between the two lies one all-to-all of flat buffers. Plain ATen ops, so that a compiler can fuse them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from passes.layout.layout import Span
from passes.redistribution.halo_steps import Traffic

__all__ = ["Arrived", "add_up", "pack", "put_together", "row_numel", "split_sizes", "unpack"]


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
