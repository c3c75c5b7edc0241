"""The processes of all ranks: where each runs, which has gone without a word, and how this one is let out of what it
does when another has failed: its thread stopped, its connections cut.

A main thread that plans is stopped between two steps of Python. A wait in gloo ends in one way only, when a connection
breaks (its `abort` interrupts nothing, torch 2.13). So a rank that has to stop shuts its connections to the others, and
every wait on them raises, here and there. So does one for ranks of the same host, that share memory
(`cost_model.measure.host_memory`).
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from autoshard.watching.telling import Board
from autoshard.watching.watch_state import State
from cost_model.measure.host_memory import cut_host_memory
from cost_model.measure.peers import machine_id


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


def this_host() -> str:
    """The same text for two processes that can see each other's ids, and for no others."""
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


@dataclass(frozen=True)
class Member:
    """The process of a rank. ends: its own ends of gloo's connections, when it came."""

    host: str
    pid: int
    ends: frozenset[Address] = frozenset()


class Crew:
    """The processes of the other ranks, as far as this one knows. told: what gloo has told of its addresses."""

    LOOK_SECONDS, SILENT_SECONDS = 5.0, 20.0

    def __init__(self, board: Board) -> None:
        self._board = board
        self.told = b""
        self._me = Member(this_host(), os.getpid())
        self._members: dict[int, Member] = {}
        self._processes = Processes()
        self._looked_at = -self.LOOK_SECONDS
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when that was new

    @property
    def complete(self) -> bool:
        """Whether every rank has come."""
        return len(self._members) == self._board.world

    @property
    def living(self) -> set[int]:
        """Ranks that have come and are not known to have died."""
        return set(self._members) - self._processes.dead()

    def join(self) -> None:
        self.told = self._board.told_by_gloo()
        self._me = replace(self._me, ends=frozenset(here for here, _ in connections(self.told)))
        self._board.write("member", self._me)

    def look(self, now: bool = False) -> None:
        """Learn about members that are new or have made process groups, now and then or `now`."""
        if not now and self.complete and time.monotonic() - self._looked_at < self.LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        self.told = self._board.told_by_gloo()
        found = self._board.read("member", range(self._board.world))
        others = {r: m for r, m in found.items() if r not in self._members and r != self._board.rank}
        self._processes.add({r: m.pid for r, m in others.items() if m.host == self._me.host})
        self._members.update(found)

    def lost_before(self) -> str | None:
        """Who ended before it called autoshard, and so told nothing; None if nobody did as far as is known.

        gloo connects all ranks when the process group is made. Connections to ranks that have come are known by
        their ends; if fewer others are left than ranks that have not come, one of these has ended.
        """
        if not self._connected or not self.told:
            return None
        open_ = [there for _, there in connections(self.told)]
        self.look(now=True)
        absent = [rank for rank in range(self._board.world) if rank not in self._members]
        known = frozenset[Address]().union(*(member.ends for member in self._members.values()))
        if sum(there not in known for there in open_) >= len(absent):
            return None
        names = ", ".join(map(str, absent))
        which = f"rank {names}" if len(absent) == 1 else f"one of the ranks {names}"
        return f"{which} has ended before it called autoshard\n  try: look at its output"

    def lost(self, states: Mapping[int, State]) -> str | None:
        """Which process is gone that has not said that it would; None if all are there.

        One of this host: by the kernel's word. A host: when nothing is heard of any of its ranks any more.
        """
        for rank in sorted(self._processes.dead()):
            state = states.get(rank) or self._board.read("state", [rank]).get(rank) or State(rank)
            if not state.ended:
                return _died(state, "its process ended without a word, as by a kill or a crash")
        now = time.monotonic()
        heard: dict[str, float] = {}
        for rank, state in states.items():
            beat, since = self._beats.get(rank, (None, now))
            self._beats[rank] = (state.beat, since if beat == state.beat else now)
            member = self._members.get(rank)
            if member is not None:
                heard[member.host] = max(heard.get(member.host, 0.0), self._beats[rank][1])
        for rank, state in states.items():
            member = self._members.get(rank)
            if member is None or state.ended or member.host == self._me.host:
                continue
            if now - heard[member.host] > self.SILENT_SECONDS:
                return _died(state, f"nothing was heard of its host for {self.SILENT_SECONDS:.0f} s")
        return None

    def lost_store(self, error: RuntimeError) -> str:
        """Why there is nobody to ask any more. The store is in rank 0's process, or in the launcher's."""
        who = (
            "rank 0 has died or ended"
            if 0 in self._processes.dead()
            else "rank 0 or the launcher has died or ended"
        )
        return (
            f"{who}, which keeps the store of the process group, while other ranks need it: "
            f"{str(error).splitlines()[0]}\n  try: look there first: its output says why"
        )

    def close(self) -> None:
        self._processes.close()

    @property
    def _connected(self) -> bool:
        """Whether gloo has connected every rank with every other."""
        return "gloo" in dist.get_backend_config() and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "1"


def _died(state: State, how: str) -> str:
    done = f"turn {state.turns[-1].number}, {state.turns[-1]}" if state.turns else "its first call"
    when = ("in " if state.inside else "after ") + done if state.turns else "before its first call"
    return f"rank {state.rank} has died {when}: {how}\n  try: look at its output, and at the memory of its machine"
