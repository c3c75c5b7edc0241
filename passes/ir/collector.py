"""Python's cyclic garbage collector, out of the way while a graph is built."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """No collections inside; also a decorator.

    A graph is one large cycle that stays alive: as it grows, the collector walks all of it again and
    again to free nothing. That took an eighth of planning a deep model. What has no cycle is freed as usual.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
