"""Ops that torch would take apart while tracing, whatever table of decompositions it is given."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["resizing_kept"]

_RESIZING = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_KEYS = ("Autograd", "CompositeImplicitAutograd")
"""Where torch's kernels in Python come before those in C++, which know the op's own backward."""


@contextmanager
def resizing_kept() -> Generator[None]:
    """Inside, resizing is one op forward and one backward, which a rule splits in space; by itself torch traces the
    places and weights of all neighbours, and gathers from a whole plane. `py_kernels` since torch 2.0."""
    packets = [getattr(torch.ops.aten, name) for name in _RESIZING.split() if hasattr(torch.ops.aten, name)]
    with ExitStack() as stack:
        for packet in packets:
            for overload in packet.overloads():
                stack.enter_context(_kernels_removed(getattr(packet, overload)))
        yield


@contextmanager
def _kernels_removed(op: Any) -> Generator[None]:
    found: dict[Any, Callable[..., Any]] = {
        key: kernel for key, kernel in op.py_kernels.items() if key.name in _KEYS
    }
    _replace(op, found, {})
    try:
        yield
    finally:
        _replace(op, {}, found)


def _replace(op: Any, old: dict[Any, Callable[..., Any]], new: dict[Any, Callable[..., Any]]) -> None:
    """Kernels of `op`. Only registering one makes torch forget which it chose last."""
    for key, kernel in old.items():
        del op.py_kernels[key]
        op.py_impl(key)(kernel)
        del op.py_kernels[key]
    for key, kernel in new.items():
        op.py_impl(key)(kernel)
