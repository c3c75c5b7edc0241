"""How long the calls of a training script wait: the first step, a new shape, the same shape again, a second run.

    python -m benchmarks.kinds                                   # GPT-2, 12 layers of width 768, 2 ranks, op by op
    python -m benchmarks.kinds --backend inductor --layers 2

Every run is processes of its own with one cache folder; the second finds the plan there. Prints Markdown: seconds of
rank 0 until the loss of a call is there.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from benchmarks.faults import free_port

__all__ = ["main"]

SHAPES = {
    "first": (2, 64),
    "again": (2, 64),
    "new batch": (3, 64),
    "new length": (2, 80),
    "new batch again": (3, 64),
}
"""Of the calls, in order: rows and tokens."""


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        runs = [_run(given, Path(folder)) for _ in range(2)]
    print(f"{given}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    print("| call | first run, s | second run, s |\n| --- | --- | --- |")
    for name in SHAPES:
        print(
            f"| {name}, {SHAPES[name][0]} x {SHAPES[name][1]} | {runs[0][name]:.2f} | {runs[1][name]:.2f} |"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kinds", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="eager")
    return parser


def _run(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    out = folder / "seconds.json"
    mp.start_processes(_rank, args=(given, free_port(), out), nprocs=given.ranks)  # type: ignore[no-untyped-call]
    return json.loads(out.read_text())


def _rank(rank: int, given: argparse.Namespace, port: int, out: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=given.ranks)
    mesh = init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("ranks",))
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=given.layers, n_embd=given.width, n_head=12))
    model = autoshard.autoshard(model, mesh, backend=given.backend, profile="cpu")
    seconds: dict[str, float] = {}
    for name, shape in SHAPES.items():
        tokens = torch.randint(0, 50257, shape)
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.item()
        seconds[name] = time.perf_counter() - start
        loss.backward()
    if rank == 0:
        out.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
