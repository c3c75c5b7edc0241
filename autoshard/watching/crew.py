"""The processes of all ranks: where each runs, and which of them has gone without a word."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from autoshard.watching.board import Board
from autoshard.watching.stopping import Address, connections
from autoshard.watching.watch_state import State
from cost_model.measure.facts import machine_id

__all__ = ["Crew", "Member", "Processes"]


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


LOOK_SECONDS = 5.0
SILENT_SECONDS = 20.0


@dataclass(frozen=True)
class Member:
    """The process of a rank. ends: its own ends of gloo's connections, when it came."""

    host: str
    pid: int
    ends: frozenset[Address] = frozenset()


class Crew:
    """What this rank knows of the others' processes. told: what gloo has told of its addresses."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.told = b""
        self._me = Member(this_host(), os.getpid())
        self._members: dict[int, Member] = {}
        self._processes = Processes()
        self._looked_at = -LOOK_SECONDS
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
        if not now and self.complete and time.monotonic() - self._looked_at < LOOK_SECONDS:
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
            if now - heard[member.host] > SILENT_SECONDS:
                return _died(state, f"nothing was heard of its host for {SILENT_SECONDS:.0f} s")
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
