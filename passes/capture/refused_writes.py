"""A trace as if nothing were written in place ends at the first write that it meets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["REFUSED_WRITES", "writes_in_place"]


def writes_in_place(module: nn.Module) -> bool:
    """Running statistics and `nn.ReLU(inplace=True)`."""
    return getattr(module, "inplace", False) or getattr(module, "track_running_stats", False)


def _refuse(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("a write in place")


_NAMES = "add_ sub_ mul_ div_ copy_ fill_ zero_ masked_fill_ index_put_ relu_"
_PACKETS = [getattr(torch.ops.aten, name) for name in _NAMES.split()]
REFUSED_WRITES = {getattr(packet, name): _refuse for packet in _PACKETS for name in packet.overloads()}
"""The usual ones, as decompositions; `has_writes` finds the others."""
