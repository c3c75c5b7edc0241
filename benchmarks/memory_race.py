"""Step times at one peak: FSDP2 with a checkpoint of every block, and autoshard within what that was measured to hold.

    python -m benchmarks.memory_race                          # a GPT, a Llama and a ViT on 4 gloo ranks
    python -m benchmarks.memory_race --models vit --rounds 9

Both train the same model on the same batch in one process group, a step of each in turn; prices are measured in the
same run. A peak is what torch's allocator was asked for in one whole step of the rank that held most, beside what
stays: parameters, AdamW's states, the batch. Prints Markdown.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from autoshard import Profile
from autoshard.reporting.tracks import peaks_of
from benchmarks.peak_memory import WORKLOADS, print_rows
from benchmarks.racing.by_hand import FSDP_SETTINGS, fsdp, setting_text
from benchmarks.racing.contestants import Meshes, Race, Runner, planned
from benchmarks.racing.measure import timed_rounds, warm_up
from benchmarks.racing.workloads import Workload
from cost_model.memory import format_bytes
from passes.ir.torch_compat import allocations

__all__ = ["main"]

MODELS = tuple(name for name, workload in WORKLOADS.items() if workload.slices and workload.sequence)
CHECKED_STEPS, PROFILE_SECONDS, SEARCH_SECONDS = 3, 10.0, 240.0


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    columns = (
        "FSDP2, blocks under checkpoint",
        "its peak",
        "step",
        "autoshard's peak",
        "predicted",
        "step",
        "ratio",
    )
    print_rows(given, columns, _rank)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_race", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=4)
    return parser


def _rank(rank: int, given: argparse.Namespace, name: str, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=given.ranks)
    flat = init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("ranks",))
    profile_ = Profile.measure(flat, time_budget=PROFILE_SECONDS, name="memory race")
    rows: list[list[str]] = []
    for setting in FSDP_SETTINGS:
        if setting["prefetch"] == 0:
            rows.append(_row(WORKLOADS[name], Meshes(flat, flat), profile_, setting, given.rounds))
            if rank == 0:  # a row takes minutes
                print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _row(
    workload: Workload, meshes: Meshes, prices: Profile, setting: dict[str, int], rounds: int
) -> list[str]:
    by_hand = fsdp(_race(_under_checkpoint(workload), meshes, prices, None), setting)
    losses = warm_up(by_hand, CHECKED_STEPS)
    limit = _peak(by_hand)
    ours = planned(_race(workload, meshes, prices, limit), mesh=meshes.flat, time_limit=SEARCH_SECONDS)
    assert torch.allclose(torch.tensor(warm_up(ours, CHECKED_STEPS)), torch.tensor(losses), rtol=1e-4)
    held = _peak(ours)
    taken = timed_rounds({"by hand": by_hand, "ours": ours}, rounds)
    hand, mine = (statistics.median(one.seconds) for one in taken.values())
    assert ours.plan is not None
    predicted = ours.plan.step_time
    return [
        setting_text(setting),
        format_bytes(limit),
        f"{hand * 1e3:.0f} ms",
        format_bytes(held),
        f"{format_bytes(ours.plan.peak_memory)}, {predicted * 1e3:.0f} ms",
        f"{mine * 1e3:.0f} ms",
        f"{mine / hand:.2f}",
    ]


def _race(workload: Workload, meshes: Meshes, prices: Profile, limit: int | None) -> Race:
    return Race(workload, meshes, prices, "eager", limit)


def _under_checkpoint(workload: Workload) -> Workload:
    """Each of its blocks computes its forward again in the backward."""

    def build() -> nn.Module:
        model = workload.build()
        for block in map(model.get_submodule, workload.blocks):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        return model

    return replace(workload, build=build)


def _peak(runner: Runner) -> int:
    """Of the rank that held most, in bytes."""
    held = runner.held_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        runner.step()
    most = torch.tensor(max(peaks_of(allocations(seen), [(0.0, "step")], held).values()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


if __name__ == "__main__":
    raise SystemExit(main())
