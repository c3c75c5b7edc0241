"""Model state and memory per rank of a wide SwiGLU with AdamW in float32, on 1, 2, 4 and 8 gloo ranks.

    python benchmarks/memory.py --world 1 2 4 8

Every rank builds the model on `meta`, plans, allocates its shards only, and takes AdamW steps. The state is
counted from the local tensors: parameters, gradients and the optimizer's. Linux only (it reads /proc).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Settings:
    """width, hidden: of the SwiGLU. batch: rows. limit: memory_limit on `world` ranks, or None."""

    world: int
    width: int
    hidden: int
    batch: int
    steps: int
    limit: int | None
    folder: str


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x), no biases. [batch, width] -> mean of squares, 0-d."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--limit", action="store_true", help="memory_limit of 1.2 times the state's share of a rank"
    )
    arguments = parser.parse_args()
    state = 4 * 4 * 3 * arguments.width * arguments.hidden
    print(
        "| ranks | parameters | gradients | AdamW | state per rank | of 1 rank | predicted peak | RSS growth |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    whole = 0
    for world in arguments.world:
        limit = int(1.2 * state / world) if arguments.limit else None
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(
                world, arguments.width, arguments.hidden, arguments.batch, arguments.steps, limit, folder
            )
            mp.start_processes(rank_main, args=(settings,), nprocs=world, start_method="spawn")
            reports = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(world)]
        worst = max(reports, key=lambda report: report["state"])
        whole = whole or worst["state"] * world
        cells = [worst[k] / 1e9 for k in ("parameters", "gradients", "optimizer", "state")]
        growth = max(report["rss_growth"] for report in reports) / 1e9
        print(
            f"| {world} | "
            + " | ".join(f"{value:.3f} GB" for value in cells)
            + f" | {worst['state'] / whole:.4f} | {worst['predicted'] / 1e9:.2f} GB | {growth:.2f} GB |",
            flush=True,
        )
        print(f"  <!-- {world}: {worst['placements']}, losses {worst['losses']} -->", flush=True)


def rank_main(rank: int, settings: Settings) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{settings.folder}/store", settings.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.world)
    try:
        report = measure(rank, settings)
        (Path(settings.folder) / f"rank{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure(rank: int, settings: Settings) -> dict[str, Any]:
    """Bytes of this rank after training: by kind, and the growth of its peak resident set since planning."""
    from autoshard import autoshard

    mesh = init_device_mesh("cpu", (settings.world,), mesh_dim_names=("ranks",))
    with torch.device("meta"):
        model = SwiGLU(settings.width, settings.hidden)
    x = torch.randn(settings.batch, settings.width, generator=torch.Generator().manual_seed(0))
    autoshard(model, mesh, (x,), memory_limit=settings.limit, profile="cpu", backend="eager", tune="first")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over, from here
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).normal_(std=settings.width**-0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(settings.steps):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 6))
    plan: Any = model.autoshard_plan
    kinds = {
        "parameters": sum(nbytes(p) for p in model.parameters()),
        "gradients": sum(nbytes(p.grad) for p in model.parameters() if p.grad is not None),
        "optimizer": sum(nbytes(v) for s in optimizer.state.values() for v in s.values()),
    }
    return {
        **kinds,
        "state": sum(kinds.values()),
        "predicted": plan.peak_memory,
        "rss_growth": resident("VmHWM") - before,
        "placements": {name: str(p[0]) for name, p in plan.parameters.items()},
        "losses": losses,
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of what this rank holds of `tensor`."""
    shard = local(tensor)
    return shard.numel() * shard.element_size()


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
