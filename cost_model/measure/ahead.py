"""Work timed on a device while the host that issues it is ahead.

A small collective takes a GPU some 15 us, and its host two or three times as long to issue. In a step the host is
ahead, since large kernels run. Small ones that are called in a row measure the host instead. So the device is kept busy
first, until the host has issued all that is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["AheadDevice", "CudaDevice", "ahead_seconds"]

Work = Callable[[], object]

_AT_ONCE = 16
"""Calls issued while the device is held. A call has some 15 kernels, and a GPU queues about a thousand before its host
waits."""
_MARGIN = 2.0
_LONGEST = 0.1
"""Seconds of a hold, at most."""


class AheadDevice(Protocol):
    """A device that works through what it is given while the host goes on."""

    def now(self) -> float:
        """Seconds on the host."""
        ...

    def hold(self, seconds: float) -> None:
        """Give it computing for about `seconds`."""
        ...

    def mark(self) -> Any:
        """A point in the queue of its work."""
        ...

    def between(self, start: Any, end: Any) -> float:
        """Seconds on the device between two marks that it has passed."""
        ...

    def finish(self) -> None:
        """Wait until it has done all."""
        ...


def ahead_seconds(device: AheadDevice, work: Work, calls: int) -> float:
    """Seconds of one call on the device, averaged over `calls`.

    How often `work` is called depends on `calls` alone, so that ranks that communicate in it agree. The first call of
    each run is not timed, as ranks meet in it.
    """
    issue = min(_issue_seconds(device, work) for _ in range(2))  # the first call may set up connections
    total = 0.0
    for first in range(0, calls, _AT_ONCE):
        count = min(_AT_ONCE, calls - first)
        device.hold(min(_LONGEST, _MARGIN * issue * (count + 1)))
        work()
        start = device.mark()
        for _ in range(count):
            work()
        end = device.mark()
        device.finish()
        total += device.between(start, end)
    return total / calls


def _issue_seconds(device: AheadDevice, work: Work) -> float:
    """Seconds of the host for one call."""
    device.finish()
    start = device.now()
    work()
    seconds = device.now() - start
    device.finish()
    return seconds


class CudaDevice:
    """The current GPU. Work goes to its current stream."""

    def __init__(self) -> None:
        self._x = torch.ones(_EDGE, _EDGE, device="cuda")
        self._product_seconds, issue = self._timed()
        self._can_hold = self._product_seconds > issue

    def _timed(self) -> tuple[float, float]:
        """Seconds of one product on the device, and of the host to issue it."""
        torch.mm(self._x, self._x)  # sets up the library
        self.finish()
        start, begun = self.mark(), self.now()
        for _ in range(_PRODUCTS):
            torch.mm(self._x, self._x)
        issue = self.now() - begun
        end = self.mark()
        self.finish()
        return self.between(start, end) / _PRODUCTS, issue / _PRODUCTS

    def now(self) -> float:
        return time.perf_counter()

    def hold(self, seconds: float) -> None:
        """Does nothing where issuing takes longer than computing, as for kernels that do nothing: no number of products
        would hold the device."""
        for _ in range(1 + int(seconds / self._product_seconds) if self._can_hold else 0):
            torch.mm(self._x, self._x)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e-3

    def finish(self) -> None:
        torch.cuda.synchronize()


_EDGE, _PRODUCTS = 2048, 8
"""Float32. A product takes an H100 about 0.4 ms, so that few of them hold it."""
