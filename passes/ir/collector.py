"""Python's cyclic garbage collector: out of the way while a graph is built, and asked for the objects it knows."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


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


def live(kinds: type[T] | tuple[type[T], ...]) -> list[T]:
    """Every object of these classes that there is."""
    objects = gc.get_objects()
    # type(), not isinstance: the latter asks every object, lazily loaded modules included.
    found = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [one for one in objects if type(one) in found] if found else []
