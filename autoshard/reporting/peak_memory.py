"""The most bytes that a step held: as the allocator counts on GPUs, and what was asked for on CPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from autoshard.reporting.step_again import PHASES, Again
from passes.ir.torch_compat import allocations
from passes.ir.torch_dtensor import local_of

__all__ = ["CudaCounter", "PeakCounter", "held_nbytes", "peak_counter", "peaks_of", "run_peaks"]


class PeakCounter(Protocol):
    """What a device counts by itself; tests bring their own."""

    def reset(self) -> None:
        """From now on."""
        ...

    def peak(self) -> int:
        """The most bytes allocated at once since then."""
        ...


class CudaCounter:
    """Of the caching allocator: tensors, not what it keeps for later. A report resets its peak."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


def peak_counter(device_type: str) -> PeakCounter | None:
    """None on CPUs, which count nothing by themselves: `run_peaks`."""
    return CudaCounter() if device_type == "cuda" else None


def run_peaks(step: Again, held: int) -> Mapping[str, int]:
    """Phase -> the most bytes that were allocated at once, on CPUs: the step run once more under torch's profiler,
    which sees every request for memory, tensors and workspaces of kernels alike.

    held: bytes that are there throughout, `held_nbytes`.
    """
    step.run()  # what is made once, and kept, is none of a step's
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step.run()
    ranges = [(e.time_range.start * 1e-6, e.name) for e in seen.events() or () if e.name in PHASES]
    return peaks_of(allocations(seen), sorted(ranges), held)


def peaks_of(
    changes: Iterable[tuple[float, int]], begins: Sequence[tuple[float, str]], held: int
) -> Mapping[str, int]:
    """changes: (seconds, bytes more or less), in order. begins: of the phases, which may come several times, in order:
    (seconds on the same clock, phase)."""
    now, phase = held, begins[0][1]
    later = list(reversed(begins[1:]))
    most = {phase: held}
    for at, nbytes in changes:
        while later and at >= later[-1][0]:
            phase = later.pop()[1]
            most[phase] = max(most.get(phase, 0), now)
        now += nbytes
        most[phase] = max(most[phase], now)
    for _, phase in reversed(later):
        most[phase] = max(most.get(phase, 0), now)
    return most


def held_nbytes(
    inputs: Iterable[Tensor], parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]
) -> int:
    """Bytes of this rank's parts that a step finds and leaves: its inputs, parameters and buffers among them, and what
    optimizers keep for the parameters. Each storage counts once."""
    owned = list(parameters)
    states = (one.state.get(p, {}).values() for one in optimizers for p in owned)
    kept = (value for values in states for value in values if isinstance(value, Tensor))
    storages = (local_of(tensor).untyped_storage() for tensor in itertools.chain(inputs, kept))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
