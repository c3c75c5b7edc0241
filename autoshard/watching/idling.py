"""Whether a thread waits, or computes, or would compute if the machine let it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Idling", "wanted_seconds"]

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
