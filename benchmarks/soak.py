"""Many steps of four kinds of plan, with evaluation, checkpoints and changing shapes between: no crash, no leak.

    python -m benchmarks.soak --steps 10000
    python -m benchmarks.soak --steps 3000 --ranks 2 --plans sizes --backend inductor

Plans like DDP, like FSDP, like tensor parallelism, of a network split in space, and of a language model whose sizes
change at every step, each in processes of its own. Each rank has a server of its own beside it on 127.0.0.1, which it
asks now and then, and sockets have a default timeout. Prints Markdown: the resident memory of the largest rank after
the first tenth of the steps and at the end, and how much the last tenth added; its threads at both times, and how many
executables it keeps. Linux only (it reads /proc).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard.runtime.module import dispatcher_of
from benchmarks.faults import free_port

__all__ = ["main"]

EVERY = 100
"""Steps between two evaluations, each with a checkpoint."""
ROWS = (8, 8, 8, 6)
"""Rows of a batch, in turn: the last of an epoch is smaller."""
WORDS = 64


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x).relu()))


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((1, 2, 3))


class Words(nn.Module):
    """A language model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(WORDS, 16), nn.LayerNorm(16), nn.Linear(16, WORDS)
        self.mix = nn.Linear(16, 48)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(x + mixed)


def _rows(step: int) -> Tensor:
    return torch.randn(ROWS[step % len(ROWS)], 16)


def _words(step: int) -> Tensor:
    """At two sizes first, then at any of 1,200."""
    sizes = random.Random(step)
    size = (8, 8 + 4 * step) if step < 2 else (sizes.randint(2, 21), sizes.randint(2, 61))
    return torch.randint(0, WORDS, size)


Plan = tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, Any]]

PLANS: dict[str, Plan] = {
    "DDP": (Perceptron, _rows, {"constraints": {"*": [Replicate()]}}),
    "FSDP": (Perceptron, _rows, {"constraints": {"*": [Shard(0)]}}),
    "tensor parallelism": (
        Perceptron,
        _rows,
        {"constraints": {"up.*": [Shard(0)], "down.weight": [Shard(1)], "down.bias": [Replicate()]}},
    ),
    "halos": (Picture, lambda step: torch.randn(ROWS[step % 4], 2, 32, 8), {"in_placements": [Shard(2)]}),
    "sizes": (Words, _words, {"constraints": {"*": [Replicate()]}}),
}
"""Of each: the model, a step's batch, arguments of `autoshard`."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two evaluations")
    parser.add_argument("--backend", default="eager")
    given = parser.parse_args(words)
    print(f"{given}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    print(
        "| plan | steps | s | MB after the first tenth | MB at the end | MB added in the last tenth | threads | "
        "executables | loss |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    for name in given.plans:
        with tempfile.TemporaryDirectory() as folder:
            out, start = Path(folder) / "figures", time.perf_counter()
            mp.start_processes(_rank, args=(name, given, free_port(), out), nprocs=given.ranks)  # type: ignore[no-untyped-call]
            ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(given.ranks)]
        worst = max(ranks, key=lambda figures: figures["memory"][-1])
        memory, seconds = worst["memory"], time.perf_counter() - start
        added = memory[-1] - memory[-1 - max(1, len(memory) // 10)]
        begun = memory[len(memory) // 10]
        figures = [name, given.steps, f"{seconds:.0f}", f"{begun:.1f}", f"{memory[-1]:.1f}", f"{added:.2f}"]
        figures += [_range(worst["threads"]), _range(worst["executables"]), f"{worst['loss']:.4f}"]
        print("| " + " | ".join(map(str, figures)) + " |", flush=True)
    return 0


def _range(counts: Sequence[int]) -> str:
    """After the first tenth, and at the end."""
    return f"{counts[len(counts) // 10]} to {counts[-1]}"


class Answer(socketserver.StreamRequestHandler):
    """Each line comes back."""

    def handle(self) -> None:
        self.connection.settimeout(None)  # it was accepted with the default one
        for line in self.rfile:
            self.wfile.write(line)


def _rank(rank: int, name: str, given: argparse.Namespace, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = socket.create_connection(("127.0.0.1", int(server.server_address[1]))).makefile("rw")
    socket.setdefaulttimeout(30.0)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=given.ranks)
    mesh = init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("ranks",))
    torch.manual_seed(0)
    make, batch, settings = PLANS[name]
    model = autoshard.autoshard(make(), mesh, backend=given.backend, profile="cpu", **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counts: dict[str, list[float]] = {"memory": [], "threads": [], "executables": []}
    loss = torch.zeros(())
    for step in range(given.steps):
        torch.manual_seed(step)
        x = batch(step)
        if "in_placements" in settings:
            x = x.chunk(given.ranks, 2)[rank]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % given.every == given.every - 1:
            _evaluate(model, x)
            with autoshard.new_checkpoint(f"{out}.checkpoints", step, mesh, keep=1) as folder:
                dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
            client.write(f"{step}\n")
            client.flush()
            if client.readline() != f"{step}\n":
                raise ConnectionError("the server beside the run did not answer")
            gc.collect()
            counts["memory"].append(_resident())
            counts["threads"].append(len(list(Path("/proc/self/task").iterdir())))
            counts["executables"].append(_executables(model))
    Path(f"{out}.{rank}").write_text(json.dumps({**counts, "loss": loss.item()}))
    dist.barrier()
    dist.destroy_process_group()


def _evaluate(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def _executables(model: nn.Module) -> int:
    dispatcher = dispatcher_of(model)
    return 0 if dispatcher is None else sum(map(len, dispatcher.executables.values()))


def _resident() -> float:
    """Of this process, MB."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
