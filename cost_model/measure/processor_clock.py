"""What computing takes where ranks share cores.

By the clock a kernel of 12 ms takes a rank 12 ms or 24, as another has its turn before, in between or after: four ranks
on two cores measured 11.6 to 23.3 ms in windows of 20 ms, and 22 to 25 in windows of 400. The processor time of it was
11.5 to 12.7 ms in each. So the processor time counts, as often as ranks share each core.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from cost_model.measure.clock import Clock, CpuClock, Work, device_clock
from cost_model.measure.facts import machine_id, own_cores
from cost_model.measure.peers import Peers

__all__ = ["ProcessorClock", "clocks", "compute_clock", "ranks_per_core"]


@dataclass(frozen=True)
class ProcessorClock(CpuClock):
    """Of work that waits for nobody. ranks_per_core: that compute at once."""

    ranks_per_core: float

    def seconds(self, work: Work, calls: int, ahead: bool = False) -> float:
        start = time.process_time()
        for _ in range(calls):
            work()
        return (time.process_time() - start) * self.ranks_per_core / calls


def clocks(device_type: str, peers: Peers, given: Clock | None) -> tuple[Clock, Clock]:
    """Of all that is timed, and of kernels alone. given: for both; None: those of the device."""
    if given is not None:
        return given, given
    clock = device_clock(device_type)
    return clock, compute_clock(device_type, peers) or clock


def compute_clock(device_type: str, peers: Peers) -> Clock | None:
    """Of kernels alone; None where the clock of all else serves: on GPUs, and where ranks have cores enough."""
    shared = ranks_per_core(peers) if device_type == "cpu" else None
    return None if shared is None else ProcessorClock(shared)


def ranks_per_core(peers: Peers) -> float | None:
    """Of the cores that this rank may use; None where there is a core for every thread of the ranks that use them."""
    machine, cores = machine_id(), frozenset(own_cores())
    said = peers.everyones((machine, cores, torch.get_num_threads()))
    near = [one for one in said if one[0] == machine and one[1] & cores]
    whole = len(frozenset[int]().union(*(used for _, used, _ in near)))
    threads = sum(count for _, _, count in near)
    return len(near) / whole if threads > whole and os.name == "posix" else None
