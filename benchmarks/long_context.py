"""A Llama on sequences that ranks have parts of: what a rank holds and works, beside one rank with all of it.

    python -m benchmarks.long_context                                  # 4 layers, 32,768 tokens, 1 and 4 ranks
    python -m benchmarks.long_context --tokens 8192 --width 128 --ranks 1 2 4

One sequence, its parts given to the ranks (`in_placements`), gloo, eager, float32, planned under the nominal profile
of CPUs. The processor time is of the rank's own process in one forward and backward after the first: ranks may
outnumber cores. The peak is what torch's allocator was asked for (`autoshard.report`). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoshard
from benchmarks.faults import free_port
from benchmarks.racing.more_workloads import llama
from benchmarks.step_cells import taken_on
from cost_model.memory import format_bytes

LAYERS, VOCABULARY = 4, 128
COLUMNS = (
    "ranks",
    "peak, predicted",
    "measured",
    "of one rank's",
    "step, predicted",
    "of one rank's",
    "CPU s of a rank, least and most",
    "the mean of one rank's",
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_context", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=64, help="of heads of 32")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    given = parser.parse_args(words)
    print(f"{LAYERS} layers of {given.width}, 1 x {given.tokens:,} tokens; {taken_on()}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'| ---: ' * len(COLUMNS)}|")
    first: list[dict[str, float]] | None = None
    for ranks in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_rank, (given, ranks, free_port(), Path(folder)), nprocs=ranks)  # type: ignore[no-untyped-call]
            rows = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
        first = first or rows
        print(_line(rows, first), flush=True)
    return 0


def _line(rows: Sequence[dict[str, float]], first: Sequence[dict[str, float]]) -> str:
    most = lambda of, name: max(row[name] for row in of)
    mean = lambda of: sum(row["work"] for row in of) / len(of)
    share = lambda name: f"{most(rows, name) / most(first, name):.3f}"
    cells = (
        str(len(rows)),
        format_bytes(int(most(rows, "predicted"))),
        format_bytes(int(most(rows, "peak"))),
        share("peak"),
        f"{most(rows, 'step'):.2f} s",
        share("step"),
        f"{min(row['work'] for row in rows):.1f}, {most(rows, 'work'):.1f}",
        f"{mean(rows) / mean(first):.3f}",
    )
    return f"| {' | '.join(cells)} |"


def _rank(rank: int, given: argparse.Namespace, ranks: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    workload = llama(VOCABULARY, given.tokens, given.width, LAYERS, batch=1, head=32)
    torch.manual_seed(0)
    model = workload.build()
    batch = [part.chunk(ranks, dim=1)[rank] for part in workload.batch()]
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    placements = tuple((Shard(1),) for _ in batch)
    autoshard.autoshard(model, mesh, profile="cpu", tune="first", backend="eager", in_placements=placements)
    model(*batch).backward()
    before = time.process_time()
    model(*batch).backward()
    work = time.process_time() - before
    with autoshard.report(model, warmup=1, repeats=1) as report:
        for _ in range(2):
            model(*batch).backward()
    peak, plan = report.figures.peak_memory, model.autoshard_plan
    assert peak is not None and peak.predicted is not None
    row = {"peak": peak.measured, "predicted": peak.predicted, "step": plan.step_time, "work": work}
    (folder / f"{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
