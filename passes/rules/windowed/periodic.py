"""Parts of a tensor by spans whose positions count modulo the dims' lengths: real data, for trials of rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from passes.layout.layout import Span

__all__ = ["spread", "taken"]


def _places(span: Span, length: int) -> torch.Tensor:
    return torch.arange(*span) % length


def taken(whole: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """What lies at `spans`, one per dim."""
    for dim, span in enumerate(spans):
        if span != (0, whole.shape[dim]):
            whole = whole.index_select(dim, _places(span, whole.shape[dim]))
    return whole


def spread(
    part: torch.Tensor, dims: Collection[int], spans: Sequence[Span], shape: Sequence[int]
) -> torch.Tensor:
    """`part`, whose `dims` lie at their spans of a tensor of `shape`, in zeros of it: positions that meet add up."""
    for dim in dims:
        sizes = [*part.shape]
        sizes[dim] = shape[dim]
        part = part.new_zeros(sizes).index_add(dim, _places(spans[dim], shape[dim]), part)
    return part
