"""What NCCL was asked for in the environment, and what it can do."""

from __future__ import annotations

import os

import torch
from torch.cuda import nccl

__all__ = ["ask_for_host_order", "in_host_order"]

_HOST_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_SINCE = (2, 26)


def in_host_order() -> bool:
    """Whether NCCL runs the kernels of several communicators of a GPU in the order in which the host issued them.

    Then they may be in flight together, since every rank issues in one order. [NCCL user guide, "Using
    multiple NCCL communicators concurrently"; since NCCL 2.26]
    """
    if os.environ.get(_HOST_ORDER, "0") in ("", "0") or not torch.cuda.is_available():
        return False
    return nccl.version()[:2] >= _SINCE


def ask_for_host_order() -> None:
    """For scripts of our own, before the process group is made: NCCL reads its environment once."""
    os.environ.setdefault(_HOST_ORDER, "1")
