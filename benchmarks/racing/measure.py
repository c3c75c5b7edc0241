"""Steps of several contestants in turn, in one process group, and what they took."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.racing.contestants import Runner

__all__ = ["TURN", "Taken", "mean_loss", "timed_rounds", "warm_up"]

TURN = 2
"""Steps of a contestant before the next one has its turn. The last counts."""


def warm_up(runner: Runner, steps: int) -> list[float]:
    """The global losses of the first steps, compilation included."""
    return [mean_loss(runner.step()) for _ in range(steps)]


def mean_loss(loss: Tensor) -> float:
    """The mean over all ranks: the loss of the whole batch, whether ranks have equal slices or all of it."""
    value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().double().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@dataclass(frozen=True)
class Taken:
    """seconds: of each step, of the slowest rank. cpu_seconds: of each step, processor time of all ranks."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]


def timed_rounds(runners: Mapping[str, Runner], rounds: int) -> dict[str, Taken]:
    """What a step of each contestant takes in each round: A B C C B A A B C ...

    In turn, so that whatever else the machine does meets all alike; back and forth. The last step of a turn counts:
    the first finds caches that the contestant before it filled, as no training loop does.
    """
    names = list(runners)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                taken[name].append(_timed(runners[name]))
    finally:
        gc.enable()
    return {name: _of_all_ranks(steps) for name, steps in taken.items()}


def _timed(runner: Runner) -> tuple[float, float]:
    """(seconds, processor seconds) of the last step of a turn on this rank, from a common start."""
    for _ in range(TURN - 1):
        runner.step()
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    runner.step()
    return time.perf_counter() - start, time.process_time() - cpu


def _of_all_ranks(steps: list[tuple[float, float]]) -> Taken:
    seconds, cpu_seconds = torch.tensor(steps, dtype=torch.float64).T.contiguous()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu_seconds)
    return Taken(tuple(seconds.tolist()), tuple(cpu_seconds.tolist()))
