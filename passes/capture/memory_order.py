"""How a tensor lies in memory: which of its dims are the outer ones, and whether there are gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def by_stride(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dims, those of the greatest strides first; of size 1 in front, whatever their strides."""
    return sorted(range(len(sizes)), key=lambda d: (sizes[d] > 1, -strides[d] if sizes[d] > 1 else 0))


def lies_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill one run of memory, each place once."""
    run = 1
    for d in reversed(by_stride(sizes, strides)):
        if sizes[d] > 1 and strides[d] != run:
            return False
        run *= sizes[d]
    return True


def inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


@dataclass(frozen=True)
class Arrangement:
    """How a tensor lies in memory, whatever its sizes.

    order: its dims, the outer ones first. gaps: those between whose elements memory is left out. repeated: those whose
    elements share a place (`expand`)."""

    order: tuple[int, ...]
    gaps: frozenset[int]
    repeated: frozenset[int]


Lies = Arrangement | tuple[int, ...] | None
"""How a tensor lies in memory: None where its shape says it, strides where elements overlap."""


def lies_as(tensor: Tensor) -> Lies:
    strides = strides_of(tensor)
    return None if strides is None else _arrangement(tensor.shape, strides) or strides


def strides_of(tensor: Tensor) -> tuple[int, ...] | None:
    """None where they follow from the shape."""
    return None if tensor.is_contiguous() else tensor.stride()


def _arrangement(sizes: Sequence[int], strides: Sequence[int]) -> Arrangement | None:
    """None where elements overlap in another way than `expand`'s."""
    order, gaps = by_stride(sizes, strides), set[int]()
    repeated = {dim for dim, stride in enumerate(strides) if stride == 0 and sizes[dim] > 1}
    run = reach = 1
    for dim in reversed([dim for dim in order if sizes[dim] > 1 and dim not in repeated]):
        if strides[dim] < reach:
            return None
        if strides[dim] != run:
            gaps.add(dim)
        run, reach = strides[dim] * sizes[dim], strides[dim] * (sizes[dim] - 1) + reach
    return Arrangement(tuple(order), frozenset(gaps), frozenset(repeated))


def laid(shape: Sequence[Any], lies: Lies, **how: Any) -> Tensor:
    """`torch.empty(shape, **how)` that lies so."""
    if isinstance(lies, tuple):
        return torch.empty_strided(tuple(shape), lies, **how)
    if lies is None:
        return torch.empty(tuple(shape), **how)
    sizes, places = list[Any](), list[int]()
    for dim in lies.order:
        places.append(len(sizes))
        sizes.append(1 if dim in lies.repeated else shape[dim])
        if dim in lies.gaps:
            sizes.append(2)
    whole = torch.empty(sizes, **how)
    for place in reversed([at for at in range(len(sizes)) if at not in places]):
        whole = whole.select(place, 0)
    return whole.permute(inverse(lies.order)).expand(tuple(shape))


def relaid(x: Tensor, lies: Lies) -> Tensor:
    """`x`, lying so; of elements that share a place there, the first. As it is where elements overlap."""
    if not isinstance(lies, Arrangement):
        return x
    made = laid(x.shape, lies, dtype=x.dtype, device=x.device)
    place = made
    for dim in lies.repeated:
        place, x = place.narrow(dim, 0, 1), x.narrow(dim, 0, 1)
    place.copy_(x)
    return made
