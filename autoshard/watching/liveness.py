"""Whether other processes live, told by the kernel: a busy or stopped process lives, a killed one does not."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping
from contextlib import suppress

from cost_model.measure.peers import machine_id

__all__ = ["Processes", "this_host"]


def this_host() -> str:
    """What is the same for two processes that can see each other's ids, and for no others."""
    parts = [socket.gethostname(), machine_id()]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


class Processes:
    """Other processes of this host, by rank. Where the kernel has no pidfd (macOS), by asking for the id."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # file descriptor -> rank
        self._ids: dict[int, int] = {}  # rank -> process id, where there is no pidfd
        self._dead: set[int] = set()
        self._poll = select.poll()

    def add(self, ids: Mapping[int, int]) -> None:
        """ids: rank -> process id."""
        for rank, pid in ids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead.add(rank)
            except (AttributeError, OSError):
                self._ids[rank] = pid
            else:
                self._open[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> set[int]:
        """Ranks whose process has ended, reaped by its parent or not."""
        if self._open:
            for descriptor, _ in self._poll.poll(0):
                self._dead.add(self._open.pop(descriptor))
                self._poll.unregister(descriptor)
                os.close(descriptor)
        for rank, pid in self._ids.items():
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                self._dead.add(rank)
            except PermissionError:
                pass
        return self._dead

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
