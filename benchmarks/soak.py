"""Many steps of four kinds of plan, with evaluation and changing shapes between: no crash, no leak.

    python -m benchmarks.soak --steps 10000

Plans like DDP, like FSDP, like tensor parallelism, and of a network split in space, each in processes of its own. Each
rank has a server of its own beside it on 127.0.0.1, which it asks now and then, and sockets have a default timeout.
Prints Markdown: the resident memory of the largest rank after the first tenth of the steps and at the end, and how
much the last tenth added. Linux only (it reads /proc).
"""

from __future__ import annotations

import argparse
import json
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
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autoshard
from benchmarks.faults import free_port

__all__ = ["main"]

EVERY = 100
"""Steps between two evaluations."""
ROWS = (8, 8, 8, 6)
"""Rows of a batch, in turn: the last of an epoch is smaller."""


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


Plan = tuple[Callable[[], nn.Module], Callable[[int], Tensor], dict[str, Any]]

PLANS: dict[str, Plan] = {
    "DDP": (Perceptron, lambda rows: torch.randn(rows, 16), {"constraints": {"*": [Replicate()]}}),
    "FSDP": (Perceptron, lambda rows: torch.randn(rows, 16), {"constraints": {"*": [Shard(0)]}}),
    "tensor parallelism": (
        Perceptron,
        lambda rows: torch.randn(rows, 16),
        {"constraints": {"up.*": [Shard(0)], "down.weight": [Shard(1)], "down.bias": [Replicate()]}},
    ),
    "halos": (Picture, lambda rows: torch.randn(rows, 2, 32, 8), {"in_placements": [Shard(2)]}),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    given = parser.parse_args(words)
    print(f"{given}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    print(
        "| plan | steps | s | MB after the first tenth | MB at the end | MB added in the last tenth | loss |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
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
        print("| " + " | ".join(map(str, [*figures, f"{worst['loss']:.4f}"])) + " |", flush=True)
    return 0


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
    model = autoshard.autoshard(make(), mesh, backend="eager", profile="cpu", **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory: list[float] = []
    loss = torch.zeros(())
    for step in range(given.steps):
        torch.manual_seed(step)
        x = batch(ROWS[step % len(ROWS)])
        if "in_placements" in settings:
            x = x.chunk(given.ranks, 2)[rank]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == EVERY - 1:
            _evaluate(model, x)
            client.write(f"{step}\n")
            client.flush()
            if client.readline() != f"{step}\n":
                raise ConnectionError("the server beside the run did not answer")
            memory.append(_resident())
    Path(f"{out}.{rank}").write_text(json.dumps({"memory": memory, "loss": loss.item()}))
    dist.barrier()
    dist.destroy_process_group()


def _evaluate(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def _resident() -> float:
    """Of this process, MB."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
