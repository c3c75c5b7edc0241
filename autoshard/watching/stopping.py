"""How a rank is let out of what it does when another has failed: its thread stopped, its connections cut.

A main thread that plans is stopped between two steps of Python. A wait in gloo ends in one way only, when a connection
breaks (its `abort` interrupts nothing, torch 2.13). So a rank that has to stop shuts its connections to the others, and
every wait on them raises, here and there. So does one for ranks of the same host, that share memory
(`cost_model.measure.host_memory`).

gloo's connections are those with an end at an address that it has told the other ranks in the store
(`Board.told_by_gloo`). Every other socket of the process is the script's. Sockets are asked by descriptor: a socket
object of Python's takes the script's default timeout, and with it changes the flags of a descriptor that its owner has,
too.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cost_model.measure.host_groups import cut_host_memory

__all__ = ["Address", "Stoppable", "Stopped", "connections", "cut", "cut_waits"]


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


Address = bytes
"""Family, port and host, as the kernel and gloo write them."""

_COMPARED = {16: 8, 28: 24}
"""Bytes of an address of IPv4 and of IPv6 -> those of them that count: no padding, no scope."""


def connections(told: bytes) -> list[tuple[Address, Address]]:
    """(here, there) of every connection of gloo's. told: what it has told of its addresses."""
    return [(here, there) for _, here, there in _connections(told)]


def cut(told: bytes) -> int:
    """Shut every connection of gloo's; how many."""
    libc = ctypes.CDLL(None)
    return sum(libc.shutdown(copy, socket.SHUT_RDWR) == 0 for copy, _, _ in _connections(told))


def cut_waits(told: bytes) -> None:
    """`cut`, and what ranks of this host share."""
    cut(told)
    cut_host_memory()


def _connections(told: bytes) -> Iterator[tuple[int, Address, Address]]:
    """With a duplicate of its descriptor, so that it stays the same one meanwhile."""
    libc = ctypes.CDLL(None)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            # Of sockets only: to close a duplicate of a file gives up the locks that the process has on it.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
            try:
                here, there = _address(libc.getsockname, copy), _address(libc.getpeername, copy)
                if here and there and (here in told or there in told):
                    yield copy, here, there
            finally:
                os.close(copy)


def _address(ask: Any, descriptor: int) -> Address:
    """Empty if it has none, or is no socket of TCP."""
    found, length = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if ask(descriptor, found, ctypes.byref(length)) != 0:
        return b""
    return found.raw[: _COMPARED.get(length.value, 0)]
