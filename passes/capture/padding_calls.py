"""`F.pad(mode="circular")` as `autoshard::circular_pad`, convolutions' own circular padding with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from passes.ops.circular_pad import circular_pad

__all__ = ["PADS", "pad"]

aten = torch.ops.aten


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """The same arguments and result as `torch.nn.functional.pad`."""
    if mode != "circular":
        return F.pad(input, pad, mode, value)
    return _circular(input, [int(n) for n in pad], value)


def _circular(x: Tensor, pads: list[int], value: float | None) -> Tensor:
    """Torch's own checks. A negative amount cuts before anything is copied, and may not leave less than the other
    side of the dim needs."""
    if value is not None and value != 0:
        raise RuntimeError('Padding mode "circular" doesn\'t take in value argument')
    if len(pads) % 2 or len(pads) // 2 + 2 != x.ndim or not 1 <= len(pads) // 2 <= 3:
        raise RuntimeError(
            f"circular padding of {2 * (x.ndim - 2)} amounts, a batch and channels aside, is due for "
            f"{x.ndim} dims; got {len(pads)}"
        )
    cut = aten.constant_pad_nd.default(x, [min(0, n) for n in pads], 0) if min(pads) < 0 else x
    pads = [max(0, n) for n in pads]
    for i, amount in enumerate(pads):
        if amount > cut.shape[x.ndim - 1 - i // 2]:
            raise RuntimeError("Padding value causes wrapping around more than once.")
    return circular_pad(cut, pads) if any(pads) else cut.clone()


PADS: dict[Any, Callable[..., Any]] = {F.pad: pad}
"""Torch functions to answer otherwise while tracing. Calls of them inside torch's modules are seen too."""
