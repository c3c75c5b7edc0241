"""Seconds that a device takes for a piece of work, as seen by the program that waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from cost_model.measure.ahead import AheadDevice, CudaDevice, ahead_seconds

__all__ = ["Clock", "CpuClock", "CudaClock", "device_clock"]

Work = Callable[[], object]


class Clock(Protocol):
    """What times work. Tests bring their own."""

    def now(self) -> float:
        """Seconds since some start, for budgets."""
        ...

    def seconds(self, work: Work, calls: int, ahead: bool = False) -> float:
        """Seconds of one call, averaged over `calls` in a row. ahead: the time of a device that does not wait for
        its host, if the device works on its own (`cost_model.measure.ahead`)."""
        ...


class CpuClock:
    """Wall time. Work is done when the call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, work: Work, calls: int, ahead: bool = False) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls


class CudaClock:
    """Time on the current stream, between two events. Work of other streams counts as far as the current one waits
    for it, as a collective's wait_tensor does."""

    def now(self) -> float:
        return time.perf_counter()

    @cached_property
    def _device(self) -> AheadDevice:
        return CudaDevice()

    def seconds(self, work: Work, calls: int, ahead: bool = False) -> float:
        if ahead:
            return ahead_seconds(self._device, work, calls)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls


def device_clock(device_type: str) -> Clock:
    """The clock of "cuda" or "cpu". Any other device is timed as the CPU is."""
    return CudaClock() if device_type == "cuda" else CpuClock()
