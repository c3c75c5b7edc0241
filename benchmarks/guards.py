"""What guards and agreement between the ranks cost a step of the demo's model.

    python -m benchmarks.guards --ranks 4

A step looks up its program, guards included, and takes two turns, which its main thread waits for; the watch is a
thread beside it, which takes what it computes. Now and then a step takes figures of inputs, replicas and updates for a
comparison.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.demo import GPT, GPTConfig, batches
from autoshard.runtime.module import dispatcher_of
from autoshard.watching.check_calls import Replicas, Sampler
from autoshard.watching.sums import Pace
from autoshard.watching.watch import Watch, watch_of
from benchmarks.faults import free_port

__all__ = ["main"]

WARM_UP = 10
THREAD = "autoshard watch"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guards", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args(words)
    mp.start_processes(_rank, args=(given.ranks, given.steps, free_port()), nprocs=given.ranks)  # type: ignore
    return 0


def _rank(rank: int, ranks: int, steps_wanted: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    torch.manual_seed(0)
    config = GPTConfig()
    x = batches(config, 16, 1)[0]
    model = autoshard.autoshard(GPT(config), mesh, backend="eager", profile="cpu", tune="first")
    watch = watch_of(mesh)
    assert watch is not None
    for _ in range(WARM_UP):
        model(*x).backward()
    clock = next(time.pthread_getcpuclockid(t.ident or 0) for t in threading.enumerate() if t.name == THREAD)
    begun, used, steps = time.perf_counter(), time.clock_gettime(clock), list[float]()
    for _ in range(steps_wanted):
        start = time.perf_counter()
        model(*x).backward()
        steps.append(time.perf_counter() - start)
    share = (time.clock_gettime(clock) - used) / (time.perf_counter() - begun)
    dispatcher = dispatcher_of(model)
    assert dispatcher is not None
    step, turn = statistics.median(steps), _median_seconds(lambda: _take(watch))
    lookup = _median_seconds(lambda: dispatcher.prepare(x, {}))
    replicas, sampler = Replicas(model, []), Sampler(4096)
    compared = _median_seconds(lambda: (sampler.sums(x, 7), replicas.sampled(7), watch.updates.told()), 5)
    # Every 32 steps at most, and seldom before half of the pause is over.
    comparing = compared / max(Pace.OFTEN * step, Pace.PAUSE_SECONDS / 2)
    together = (lookup + 2 * turn) / step + share + comparing
    # On all ranks: they have the same turns.
    if rank == 0:
        print(
            f"a step {1e3 * step:.2f} ms; looking up its program {1e6 * lookup:.1f} us: {lookup / step:.5f}; two turns "
            f"{2e6 * turn:.1f} us: {2 * turn / step:.5f}; a comparison "
            f"{1e3 * compared:.2f} ms: {comparing:.5f}; the watch of rank 0 computes {share:.5f} of the time; "
            f"together {together:.5f}"
        )
    dist.barrier()
    dist.destroy_process_group()


def _take(watch: Watch) -> None:
    with watch.turn("a turn"):
        pass


@torch.no_grad()
def _median_seconds(work: Callable[[], object], times: int = 100) -> float:
    """Of one `work()`: the median of batches, since other processes run too."""
    found: list[float] = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - start) / times)
    return statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())
