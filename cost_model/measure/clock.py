"""Seconds that a device takes for a piece of work, as seen by the program that waits for it.

Ahead: a small collective takes a GPU some 15 us, and its host two or three times as long to issue. In a step the host
is ahead, since large kernels run. Small ones that are called in a row measure the host instead. So the device is kept
busy first, until the host has issued all that is timed.

On shared cores: by the clock a kernel of 12 ms takes a rank 12 ms or 24, as another has its turn before, in between or
after: four ranks on two cores measured 11.6 to 23.3 ms in windows of 20 ms, and 22 to 25 in windows of 400. The
processor time of it was 11.5 to 12.7 ms in each. So the processor time counts, as often as ranks share each core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cost_model.measure.peers import Peers, machine_id, own_cores

Work = Callable[[], object]

_AT_ONCE = 16
"""Calls issued while the device is held. A call has some 15 kernels, and a GPU queues about a thousand before its host
waits."""


class Marks:
    """Points in time of the host, where work is done when its call returns."""

    def mark(self) -> Any:
        """Now: after all that was issued before."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks."""
        return end - start


class CudaMarks(Marks):
    """Events on the current stream: nothing is waited for until seconds are asked for, so that marks do
    not slow down what they measure."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e-3


def marks_of(device_type: str) -> Marks:
    """The marks of "cuda" or "cpu"; any other device is timed as the CPU is."""
    return CudaMarks() if device_type == "cuda" else Marks()


def ahead_seconds(device: CudaDevice, work: Work, calls: int) -> float:
    """Seconds of one call on the device, averaged over `calls`.

    How often `work` is called depends on `calls` alone, so that ranks that communicate in it agree. The first call of
    each run is not timed, as ranks meet in it.
    """
    issue = min(_issue_seconds(device, work) for _ in range(2))  # the first call may set up connections
    total = 0.0
    for first in range(0, calls, _AT_ONCE):
        count = min(_AT_ONCE, calls - first)
        # Twice what issuing took, as it varies; no longer than a tenth of a second.
        device.hold(min(0.1, 2.0 * issue * (count + 1)))
        work()
        start = device.mark()
        for _ in range(count):
            work()
        end = device.mark()
        device.finish()
        total += device.seconds(start, end)
    return total / calls


def _issue_seconds(device: CudaDevice, work: Work) -> float:
    """Seconds of the host for one call."""
    device.finish()
    start = device.now()
    work()
    seconds = device.now() - start
    device.finish()
    return seconds


class CudaDevice(CudaMarks):
    """The current GPU, which works through what it is given while its host goes on. Work goes to its current stream.
    Tests bring their own."""

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
        return self.seconds(start, end) / _PRODUCTS, issue / _PRODUCTS

    def now(self) -> float:
        """Seconds on the host."""
        return time.perf_counter()

    def hold(self, seconds: float) -> None:
        """Give it computing for about `seconds`. Does nothing where issuing takes longer than computing, as for kernels
        that do nothing: no number of products would hold the device."""
        for _ in range(1 + int(seconds / self._product_seconds) if self._can_hold else 0):
            torch.mm(self._x, self._x)

    def finish(self) -> None:
        """Wait until it has done all."""
        torch.cuda.synchronize()


_EDGE, _PRODUCTS = 2048, 8
"""Float32. A product takes an H100 about 0.4 ms, so that few of them hold it."""


class Clock:
    """Times work by wall time, where work is done when the call returns. Tests bring their own."""

    marks = Marks()

    def now(self) -> float:
        """Seconds since some start, for budgets."""
        return time.perf_counter()

    def seconds(self, work: Work, calls: int, ahead: bool = False) -> float:
        """Seconds of one call, averaged over `calls` in a row. ahead: the time of a device that does not wait for
        its host, if the device works on its own."""
        start = self.marks.mark()
        for _ in range(calls):
            work()
        return self.marks.seconds(start, self.marks.mark()) / calls


class CudaClock(Clock):
    """Time on the current stream, between two events. Work of other streams counts as far as the current one waits
    for it, as a collective's wait_tensor does."""

    marks = CudaMarks()

    @cached_property
    def _device(self) -> CudaDevice:
        return CudaDevice()

    def seconds(self, work: Work, calls: int, ahead: bool = False) -> float:
        if ahead:
            return ahead_seconds(self._device, work, calls)
        torch.cuda.synchronize()
        return super().seconds(work, calls)


def device_clock(device_type: str) -> Clock:
    """The clock of "cuda" or "cpu". Any other device is timed as the CPU is."""
    return CudaClock() if device_type == "cuda" else Clock()


@dataclass(frozen=True)
class ProcessorClock(Clock):
    """Processor time, for work that waits for nobody. ranks_per_core: that compute at once."""

    ranks_per_core: float

    def seconds(self, work: Work, calls: int, ahead: bool = False) -> float:
        start = time.process_time()
        for _ in range(calls):
            work()
        return (time.process_time() - start) * self.ranks_per_core / calls


def clocks(device_type: str, peers: Peers, given: Clock | None) -> tuple[Clock, Clock]:
    """The clock of all that is timed, and that of kernels alone. given: for both; None: those of the device."""
    if given is not None:
        return given, given
    clock = device_clock(device_type)
    return clock, compute_clock(device_type, peers) or clock


def compute_clock(device_type: str, peers: Peers) -> Clock | None:
    """The clock of kernels; None where the clock of all else serves: on GPUs, and where ranks have cores enough."""
    shared = ranks_per_core(peers) if device_type == "cpu" else None
    return None if shared is None else ProcessorClock(shared)


def ranks_per_core(peers: Peers) -> float | None:
    """Ranks for each core that this one may use; None where there is a core for every thread of those ranks."""
    machine, cores = machine_id(), frozenset(own_cores())
    said = peers.everyones((machine, cores, torch.get_num_threads()))
    near = [one for one in said if one[0] == machine and one[1] & cores]
    whole = len(frozenset[int]().union(*(used for _, used, _ in near)))
    threads = sum(count for _, _, count in near)
    return len(near) / whole if threads > whole and os.name == "posix" else None
