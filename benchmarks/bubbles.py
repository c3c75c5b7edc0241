"""Time a step of every pipeline schedule, as predicted and as torch runs it: 4 gloo processes whose stages sleep.

python -m benchmarks.bubbles [--pieces 8]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from autoshard.runtime.pipeline_program import torch_schedule
from autoshard.runtime.pipeline_stage import PipelineStage, run_pieces
from passes.stages.pipeline_orders import StageSeconds, pipeline_order, pipeline_timeline
from passes.stages.stage_graph import Crossing

RANKS, STEPS = 4, 8
SECONDS = StageSeconds(forward=0.020, input=0.030, weight=0.015)
"""Unlike, so that no order is right by chance; long beside what a busy machine adds."""
TRANSFER_SECONDS = 0.0005
"""About what 16 KiB take on loopback."""
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))


class Sleeping:
    """Takes the seconds of a stage and passes zeros."""

    def __init__(self, stage: int, stages: int) -> None:
        self._sent = [torch.zeros(64, 64)] if stage < stages - 1 else []
        self._returned = [torch.zeros(64, 64)] if stage else []

    def forward(self, piece: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        time.sleep(SECONDS.forward)
        return self._sent

    def backward(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        self.backward_weight(piece)
        return self.backward_input(piece, returned)

    def backward_input(self, piece: int, returned: Sequence[Tensor]) -> Sequence[Tensor]:
        time.sleep(SECONDS.input)
        return self._returned

    def backward_weight(self, piece: int) -> None:
        time.sleep(SECONDS.weight)


def passing(boundary: int, stages: int) -> tuple[Crossing, ...]:
    inside = 0 <= boundary < stages - 1
    return (Crossing("x", boundary, boundary, (64, 64), torch.float32, gradient=True),) if inside else ()


def timed(rank: int, address: str, name: str, local: int, pieces: int) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    count = RANKS * local
    stages = [
        PipelineStage(
            Sleeping(s, count),
            [passing(s - 1, count)] * pieces,
            [passing(s, count)] * pieces,
            s,
            count,
            torch.device("cpu"),
        )
        for s in range(rank, count, RANKS)
    ]
    schedule = torch_schedule(name, stages, pieces)
    times: list[float] = []
    for _ in range(STEPS + 1):
        dist.barrier()
        start = time.perf_counter()
        run_pieces(schedule, pieces)
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        report(name, local, pieces, min(times[1:]))  # stages that sleep: what is longer, other programs took
    dist.destroy_process_group()


def report(name: str, local: int, pieces: int, measured: float) -> None:
    order = pipeline_order(name, RANKS, pieces, stages_per_rank=local)
    moved = [TRANSFER_SECONDS] * order.stages
    timeline = pipeline_timeline(order, [SECONDS] * order.stages, moved, moved)
    bubble = 1.0 - sum(timeline.busy) / RANKS / measured
    print(
        f"{name:12} {local} a rank: predicted {1e3 * timeline.seconds:6.0f} ms, bubble {timeline.bubble:.3f};"
        f" measured {1e3 * measured:6.0f} ms, bubble {bubble:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pieces", type=int, default=8)
    pieces = parser.parse_args().pieces
    for name, local in CASES:
        with tempfile.TemporaryDirectory() as folder:
            address = f"file://{folder}/store"
            mp.start_processes(timed, (address, name, local, pieces), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main()
