"""Memory that a step frees is there for the next."""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]

_LARGEST_KEPT = 2**25 - 2**16
"""Bytes of the largest block that glibc may keep when it is freed."""


def keep_freed_memory(device: torch.device) -> None:
    """glibc gives a freed block back to the system if none as large was freed before, and the next of that size is
    mapped page by page: some microseconds each. One large block, freed once, teaches it to keep 64 MiB; CUDA's
    allocator needs no such lesson. No price of a kernel has such pages, and no step is to have them.
    [glibc: mallopt(3), M_MMAP_THRESHOLD, dynamic up to 32 MiB]"""
    if device.type == "cpu":
        torch.empty(_LARGEST_KEPT, dtype=torch.uint8)  # and freed
