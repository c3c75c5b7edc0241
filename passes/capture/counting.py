"""`torch.histc` as comparisons and a sum: torch has no kernel for fakes, and on CPUs none for integers.
`torch.bincount` as an addition to places: how many there are is what it is told, or asked of the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from passes.capture.row_apply import unknown
from passes.capture.rows import Rows, one_choice, rows_in

__all__ = ["COUNTS"]


def histc(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """The same arguments and result as `torch.histc`: [*any] -> [bins], how many elements lie in each of `bins` equal
    parts of [min, max], its end in the last part. Integers are divided as integers, as torch's CUDA kernel does."""
    if min >= max:
        return torch.histc(input, bins, min, max)  # the bounds are the values' own
    flat = input.reshape(-1)
    if input.is_floating_point():
        place = ((flat - min) * bins / (max - min)).floor()
    else:
        place = torch.div((flat - int(min)) * bins, int(max) - int(min), rounding_mode="floor")
    inside = (flat >= min) & (flat <= max)
    place = torch.where(place >= bins, bins - 1, place).to(torch.int64)
    counted = (place.unsqueeze(-1) == torch.arange(bins, device=input.device)) & inside.unsqueeze(-1)
    return counted.to(input.dtype).sum(0, dtype=input.dtype)


def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """The same arguments and result as `torch.bincount`: [n] -> [minlength], how often each number is there.

    Raises where one is not below `minlength`: torch's result is longer then. Without it the values are asked."""
    if input.dim() != 1 or input.is_floating_point() or input.dtype == torch.bool:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    rows = rows_in((input, weights))
    if rows and len(rows) != 2 - (weights is None):
        raise unknown("bincount", rows[0].choice)
    x, weights = (t.padded if isinstance(t, Rows) else t for t in (input, weights))
    assert x is not None
    if weights is not None and weights.shape != x.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    there = one_choice(rows).valid if rows else torch.ones_like(x, dtype=torch.bool)
    length = minlength if minlength or not x.numel() else int(torch.where(there, x, 0).max()) + 1
    outside = (x < 0) | (x >= length)
    if (outside & there).any():
        raise ValueError(
            f"bincount: a number is negative, or not below minlength={length}\n"
            "  try: a greater minlength, on which the other counts do not depend"
        )
    there = there & ~outside
    return _added_up(torch.where(there, x, 0).to(torch.int64), there, weights, length)


def _added_up(places: Tensor, there: Tensor, weights: Tensor | None, length: int) -> Tensor:
    if weights is None:
        each = there.to(torch.int64)
    else:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        each = torch.where(there, weights.to(dtype), 0.0)
    return each.new_zeros(length).scatter_add(0, places, each)


COUNTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.histc, Tensor.histc), histc),
    **dict.fromkeys((torch.bincount, Tensor.bincount), bincount),
}
"""Torch functions to answer otherwise while tracing."""
