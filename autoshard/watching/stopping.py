"""A main thread that plans is stopped between two steps of Python when another rank has failed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["Stoppable", "Stopped"]


class Stopped(BaseException):
    """Raised in the middle of what `Stoppable.block` runs; no `except Exception` swallows it."""


class Stoppable:
    """Lets another thread end a block of this one, as Ctrl-C does in a main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    @contextmanager
    def block(self) -> Generator[None]:
        """Inside, `stop()` raises Stopped in the thread that entered."""
        outer = self._thread
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._thread = outer
                if outer is None:  # a stop that came too late must not hit what follows
                    _raise_in(threading.get_ident(), None)

    def stop(self) -> None:
        with self._lock:
            if self._thread is not None:
                _raise_in(self._thread, Stopped)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
