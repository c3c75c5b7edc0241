"""The peak of a real step beside its prediction, without a limit and within shares of that peak, on gloo ranks.

    python -m benchmarks.peak_memory                              # a GPT, a Llama, a U-Net, a ViT, a convnet and an MLP
    python -m benchmarks.peak_memory --models gpt vit --shares 1 0.7 0.5 --backend inductor

Plans are searched under a nominal profile; bytes are what torch's allocator was asked for in one step of the rank that
held most (`autoshard.report`), parameters, inputs and AdamW's states included. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoshard
from autoshard import InfeasibleError
from benchmarks.faults import free_port
from benchmarks.racing.more_workloads import llama, unet, vit
from benchmarks.racing.workloads import Workload, convnet, gpt, mlp
from cost_model.memory import format_bytes

__all__ = ["WORKLOADS", "main", "print_rows"]

WORKLOADS: dict[str, Workload] = {
    "gpt": gpt(2048, 128, 256, 12, 16),
    "llama": llama(2048, 128, 256, 4, 16),
    "unet": unet(16, 3, 128),
    "vit": vit(64, 8, 192, 6, 32),
    "convnet": convnet(24, 32, 512, 10, 64),
    "mlp": mlp(512, 2048, 4, 512),
}
STEPS, TIME_LIMIT = 3, 120.0

Rank = Callable[[int, argparse.Namespace, str, int, Path], None]
"""(rank, options, model, a free port, a JSON file that rank 0 writes rows of cells into)."""


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    print_rows(
        given,
        ("share", "limit", "predicted peak", "measured peak", "ratio", "ops again", "planned in, s"),
        _rank,
    )
    return 0


def print_rows(given: argparse.Namespace, columns: Sequence[str], rank: Rank) -> None:
    """Markdown of the rows that `given.ranks` processes write for each of `given.models`."""
    print(f"{given}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    print(f"| {' | '.join(('model', *columns))} |")
    print("| --- " * (1 + len(columns)) + "|")
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            mp.start_processes(rank, args=(given, name, free_port(), out), nprocs=given.ranks)  # type: ignore[no-untyped-call]
            for row in json.loads(out.read_text()):
                print(f"| {WORKLOADS[name].text} | {' | '.join(row)} |", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peak_memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--shares", nargs="+", type=float, default=[1.0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", default="eager")
    return parser


def _rank(rank: int, given: argparse.Namespace, name: str, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=given.ranks)
    mesh = init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("ranks",))
    rows: list[list[str]] = []
    whole: int | None = None
    for share in given.shares:
        limit = None if whole is None else int(share * whole)
        try:
            row, peak = _measured(WORKLOADS[name], mesh, given.backend, limit)
        except InfeasibleError as error:
            row, peak = ["-", "-", "-", "-", str(error).splitlines()[0]], 0
        whole = whole or peak
        rows.append([f"{share:.0%}", "-" if limit is None else format_bytes(limit), *row])
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _measured(workload: Workload, mesh: DeviceMesh, backend: str, limit: int | None) -> tuple[list[str], int]:
    """Cells of a row, and the plan's peak."""
    torch.manual_seed(0)
    model, batch = workload.build(), workload.batch()
    begun = time.perf_counter()
    options: dict[str, Any] = {"backend": backend, "memory_limit": limit, "time_limit": TIME_LIMIT}
    autoshard.autoshard(model, mesh, batch, profile="cpu", tune="first", **options)
    seconds = time.perf_counter() - begun
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with autoshard.report(model, warmup=1, repeats=1) as report:
        for _ in range(STEPS):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    peak, plan = report.figures.peak_memory, model.autoshard_plan
    assert peak is not None and peak.predicted is not None and isinstance(plan, autoshard.Plan)
    ratio = f"{peak.predicted / peak.measured:.3f}"
    sizes = [format_bytes(peak.predicted), format_bytes(peak.measured)]
    return [*sizes, ratio, str(len(plan.planned.again)), f"{seconds:.0f}"], plan.peak_memory


if __name__ == "__main__":
    raise SystemExit(main())
