"""What ranks write down for each other, and what this rank tells of itself."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from autoshard.watching.watch_state import State, Turns

_TIMEOUT = timedelta(seconds=10)
_LASTING = ("member", "state")
"""Names that are never erased."""
_OF_GLOO = re.compile(r"(^|//)[a-z]+//\d+/\d+$")
"""Keys of the process group and of those made in it: (group//) device type//number of the device/rank."""


class Board:
    """The notes of the ranks of one mesh. Nothing here waits for a rank; a store that is gone raises RuntimeError.

    It has a connection of its own, so that a main thread that waits in the store does not hold up the watch.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.world = rank, world
        # A second process group in the same processes may have the first one's store, with its old notes.
        generation = self._store.add(f"autoshard/{world}/generation/{rank}", 1)
        self._prefix = f"autoshard/{world}/{generation}"
        if self._store is not store:
            self._store.set_timeout(_TIMEOUT)
        self._written: set[str] = set()
        self._gloo: dict[str, bytes] = {}

    def close(self) -> None:
        """The store is gone: say so at once from now on, without asking it (each time, torch logs a page)."""
        self._store = _Gone()

    def write(self, name: str, value: Any) -> None:
        self._store.set(self._key(name, self.rank), pickle.dumps(value))

    def read(self, name: str, ranks: Iterable[int]) -> dict[int, Any]:
        """The values of those of `ranks` that have written."""
        there = [rank for rank in ranks if self._is_written(self._key(name, rank))]
        texts = self._store.multi_get([self._key(name, rank) for rank in there]) if there else []
        return {rank: pickle.loads(text) for rank, text in zip(there, texts, strict=True)}

    def complete(self, name: str) -> bool:
        """Whether every rank has written."""
        return self._store.check([self._key(name, rank) for rank in range(self.world)])

    def absent(self, name: str) -> list[int]:
        return [rank for rank in range(self.world) if not self._store.check([self._key(name, rank)])]

    def erase(self, name: str) -> None:
        """This rank's own."""
        self._store.delete_key(self._key(name, self.rank))

    def told_by_gloo(self) -> bytes:
        """The bytes that gloo's ranks have told each other so far: the addresses where they listen are in them.

        Empty where the store does not list its keys.
        """
        with suppress(RuntimeError):
            keys = [key for key in self._store.list_keys() if _OF_GLOO.search(key) and key not in self._gloo]
            self._gloo |= zip(keys, self._store.multi_get(keys) if keys else [], strict=True)
        return b"".join(self._gloo.values())

    def condemn(self, text: str) -> str:
        """Say to all that they have to stop, and why; the first reason stands, and is returned."""
        return self._store.compare_set(f"{self._prefix}/verdict", "", text).decode()

    def verdict(self) -> str | None:
        key = f"{self._prefix}/verdict"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _is_written(self, key: str) -> bool:
        if key in self._written:
            return True
        there = self._store.check([key])
        if there and key.split("/")[-2] in _LASTING:
            self._written.add(key)
        return there


class _Gone:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the store of the process group is gone")


class Idling:
    """Tells whether one thread of this process was idle since it was last asked.

    A thread that waits in a collective sleeps. One on a machine with more to do than it has cores stands in the queue
    for most of the time, and counts as busy: it will come. Where the kernel tells nothing of threads (macOS), the
    computing time of the process is all there is.
    """

    def __init__(self, native_id: int) -> None:
        self._folder = Path(f"/proc/self/task/{native_id}")
        self._asked, self._wanted = time.monotonic(), self._seconds()

    def is_idle(self) -> bool:
        """Whether it neither computed nor stood in the queue for half of the time."""
        asked, wanted = time.monotonic(), self._seconds()
        before, self._asked, self._wanted = (self._asked, self._wanted), asked, wanted
        return wanted - before[1] < 0.5 * (asked - before[0]) and not self._is_queued()

    def _seconds(self) -> float:
        with suppress(OSError, ValueError):
            return wanted_seconds((self._folder / "schedstat").read_text())
        return time.process_time()

    def _is_queued(self) -> bool:
        """Whether it stands in the queue now: that time is counted when it has run again."""
        with suppress(OSError):
            # The name in brackets may have anything in it.
            return (self._folder / "stat").read_text().rpartition(") ")[2].startswith("R")
        return False


def wanted_seconds(schedstat: str) -> float:
    """On a core and in the queue for one: the first two numbers of Linux's /proc/.../schedstat, in nanoseconds."""
    running, queued, *_ = map(int, schedstat.split())
    return (running + queued) / 1e9


_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _shown(path: str) -> str:
    """As a dump of stacks has it."""
    return path.encode("ascii", "backslashreplace").decode("ascii")


_TORCH = _shown(os.path.dirname(torch.__file__) + os.sep)
_DISTRIBUTED = _shown(os.path.dirname(torch.distributed.__file__) + os.sep)
_OURS = _shown(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep)
_PACKAGES = tuple(_OURS + name + os.sep for name in ("autoshard", "passes", "cost_model"))
_LIBRARY = _shown(os.path.dirname(os.__file__) + os.sep)


def whereabouts(thread: int) -> tuple[str, str]:
    """(file:line of the innermost frame that is the user's, the function of torch.distributed that it called or "").

    The stack is read as text that the interpreter writes without making an object of any frame. Frames of
    `sys._current_frames()` of a thread that goes on meanwhile crashed CPython 3.11, once in some million looks.
    """
    distributed = ""
    for file, line, function in _frames(thread):
        if file.startswith(_DISTRIBUTED) and not function.startswith(("_", "wrapper")):
            distributed = function
        elif not file.startswith((_TORCH, _LIBRARY, "<", *_PACKAGES)):
            return f"{os.path.basename(file)}:{line}", distributed
    return "", distributed


def _frames(thread: int) -> Iterator[tuple[str, str, str]]:
    """(file, line, function), the innermost first: at most 100. None where no file can be written."""
    inside = False
    for text in _stacks().splitlines():
        head, frame = _THREAD.match(text), _FRAME.match(text)
        if head is not None:
            inside = int(head[1], 16) == thread
        elif inside and frame is not None:
            yield frame[1], frame[2], frame[3]


def _stacks() -> str:
    """The stacks of all threads, as text."""
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode("ascii", "replace")
    return ""


PERIOD_SECONDS = 0.5


class Telling:
    """Tells the others where the thread is that made it; another runs it. told: the last state that they can read."""

    def __init__(self, board: Board, turns: Turns) -> None:
        self._board, self._turns = board, turns
        self.told = State(board.rank)
        self._told_at = self._since = time.monotonic()
        self._main = threading.get_ident()
        self._idling = Idling(threading.get_native_id())

    def tell(self) -> None:
        """Tells what has changed, and now and then that nothing has."""
        state = self.state()
        changed = (state.turns[-1:], state.inside, state.waits) != (
            self.told.turns[-1:],
            self.told.inside,
            self.told.waits,
        )
        now = time.monotonic()
        if changed:
            self._since = now
            state = replace(state, seconds=0.0)
        stuck = state.inside or state.waits
        # Others judge by two looks of a rank that waits, and by a beat now and then of one that goes on.
        if changed or now - self._told_at >= (PERIOD_SECONDS if stuck else 2.0):
            self._board.write("state", state)
            self.told, self._told_at = state, now

    def state(self) -> State:
        """As it is now."""
        # In torch.distributed a busy thread works on DTensors; it does not wait there.
        idle = self._idling.is_idle()
        inside, seconds = self._turns.inside, time.monotonic() - self._since
        # To look takes half a millisecond, which a loop that goes on is not to pay.
        looks = idle or seconds >= 1.0
        place, waits = whereabouts(self._main) if looks else ("", "")
        return State(
            self._board.rank,
            self.told.beat + 1,
            self._turns.last(),
            inside,
            seconds,
            place,
            waits if not inside and idle else "",
        )
