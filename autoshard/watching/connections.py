"""The connections between the processes of the ranks, cut so that nobody waits in a collective any more.

A wait in gloo ends in one way only, when a connection breaks (its `abort` interrupts nothing, torch 2.13). So a
rank that has to stop shuts its connections to the others, and every wait on them raises, here and there. So does one
for ranks of the same host, that share memory (`cost_model.measure.host_memory`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress

from cost_model.measure.host_groups import cut_host_memory

__all__ = ["Address", "connections", "cut", "cut_waits", "listening"]

Address = tuple[str, int]


def listening() -> frozenset[Address]:
    """Where this process listens on an address of its own, as gloo does (a store listens on all addresses)."""
    found: set[Address] = set()
    for sock in _sockets():
        with sock:
            here = _address(sock.getsockname())
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and here[0] not in ("0.0.0.0", "::"):
                found.add(here)
    return frozenset(found)


def connections() -> list[tuple[Address, Address]]:
    """(here, there) of every connection of this process."""
    found: list[tuple[Address, Address]] = []
    for sock in _sockets():
        with sock, suppress(OSError):  # one that listens has no other end
            found.append((_address(sock.getsockname()), _address(sock.getpeername())))
    return found


def cut(ours: Collection[Address], theirs: Collection[Address]) -> int:
    """Shut every connection that was made to `ours` from a host of theirs, or from here to `theirs`; how many."""
    hosts = {host for host, _ in theirs} | {host for host, _ in ours}
    count = 0
    for sock in _sockets():
        with sock, suppress(OSError):
            here, there = _address(sock.getsockname()), _address(sock.getpeername())
            if there in theirs or (here in ours and there[0] in hosts):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def cut_waits(ours: Collection[Address], theirs: Collection[Address]) -> None:
    """`cut`, and what ranks of this host share."""
    cut(ours, theirs)
    cut_host_memory()


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket of this process: closing it leaves the socket open.

    Not by `socket.dup`, which makes the socket blocking, the owner's too.
    """
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            sock = _duplicate(int(name))
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
            else:
                sock.close()


def _duplicate(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _address(name: tuple[object, ...]) -> Address:
    return str(name[0]).removeprefix("::ffff:"), int(str(name[1]))
