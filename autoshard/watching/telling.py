"""What this rank tells the others about itself."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed

from autoshard.watching.board import Board
from autoshard.watching.watch_state import State, Turns

__all__ = ["PERIOD_SECONDS", "Idling", "Telling", "wanted_seconds", "whereabouts"]

IDLE = 0.5
_NANOSECONDS = 1e9


class Idling:
    """Of one thread of this process, since it was last asked.

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
        return wanted - before[1] < IDLE * (asked - before[0]) and not self._is_queued()

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
    return (running + queued) / _NANOSECONDS


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
    """Of all threads."""
    with suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode("ascii", "replace")
    return ""


PERIOD_SECONDS = 0.5
BEAT_SECONDS = 2.0
LOOK_SECONDS = 1.0


class Telling:
    """Of the thread that makes it, by another. told: the last state that the others can read."""

    def __init__(self, board: Board, turns: Turns) -> None:
        self._board, self._turns = board, turns
        self.told = State(board.rank)
        self._told_at = self._since = time.monotonic()
        self._main = threading.get_ident()
        self._idling = Idling(threading.get_native_id())

    def tell(self) -> None:
        """What has changed, and now and then that nothing has."""
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
        if changed or now - self._told_at >= (PERIOD_SECONDS if stuck else BEAT_SECONDS):
            self._board.write("state", state)
            self.told, self._told_at = state, now

    def state(self) -> State:
        """As it is now."""
        # In torch.distributed a busy thread works on DTensors; it does not wait there.
        idle = self._idling.is_idle()
        inside, seconds = self._turns.inside, time.monotonic() - self._since
        # To look takes half a millisecond, which a loop that goes on is not to pay.
        looks = idle or seconds >= LOOK_SECONDS
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
