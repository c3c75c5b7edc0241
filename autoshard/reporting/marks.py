"""Points in time, on the host or on a GPU's stream."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["CudaMarks", "HostMarks", "Marks", "marks_of"]


class Marks(Protocol):
    """Where time is taken; tests bring their own."""

    def mark(self) -> Any:
        """Now: after all that was issued before."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks."""
        ...


class HostMarks:
    """Work is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaMarks:
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
    """Of "cuda" or "cpu"; any other device is timed as the CPU is."""
    return CudaMarks() if device_type == "cuda" else HostMarks()
