"""`torch.histc` as comparisons and a sum: torch has no kernel for fakes, and on CPUs none for integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


COUNTS: dict[Any, Callable[..., Any]] = {torch.histc: histc, Tensor.histc: histc}
"""Torch functions to answer otherwise while tracing."""
