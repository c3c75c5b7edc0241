"""Tests collect garbage seldom: a graph is many small objects, and by default a fifth of the time goes there."""

from __future__ import annotations

import gc

__all__ = ["collect_seldom"]


def collect_seldom() -> None:
    """What is imported is never looked at again; the rest after 100,000 new objects, not 700."""
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
