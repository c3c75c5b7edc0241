"""Adaptive pooling and bicubic resizing: batch and channels split, the plane is whole."""

from __future__ import annotations

from passes.rules.emit import sized
from passes.rules.empty import empty_safe
from passes.rules.opcall import Builder
from passes.rules.spec import spec

__all__ = ["planes"]


def planes(text: str, size: str | None = None) -> Builder:
    """A rule in which h w and y x are whole. `size`: the argument that holds the result's shape."""
    whole = "".join(f"; {factor}: whole" for factor in "hwyx" if factor in text.partition(";")[0])
    return empty_safe(spec(text + whole, None if size is None else sized(size)))
