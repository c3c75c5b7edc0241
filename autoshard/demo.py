"""The demo's two runs, one process and several ranks, and the page it prints."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard.profiling.startup import nominal_profile
from cost_model.memory import format_bytes

if TYPE_CHECKING:
    from autoshard.plan.plan import Plan


@dataclass(frozen=True)
class GPTConfig:
    """vocabulary: bytes. context: tokens of a sample. width: of the residual stream."""

    vocabulary: int = 256
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 2


class Block(nn.Module):
    """Pre-norm attention and MLP. [batch, context, width] -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.projection = nn.Linear(config.width, config.width, bias=False)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # Heads major: a split of the projection's rows by head keeps q, k and v of a head together.
        parts = self.query_key_value(self.norm1(x)).view(batch, length, self.heads, 3, width // self.heads)
        q, k, v = parts.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the mean cross-entropy of the next byte. tokens, targets: int64 [batch, context]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def demo_text() -> bytes:
    """The Python language reference, about 700 kB of English, from the standard library."""
    from pydoc_data import topics

    return "\n".join(topics.topics.values()).encode()


def batches(
    config: GPTConfig, batch: int, steps: int, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` random (tokens, targets) of int64 [batch, context]; the same on every rank."""
    data = torch.frombuffer(bytearray(demo_text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - config.context - 1, (steps, batch), generator=generator)
    span = torch.arange(config.context)
    return [(data[s[:, None] + span], data[s[:, None] + span + 1]) for s in starts]


_BATCH = 16


@dataclass(frozen=True)
class DemoRun:
    """Options of every rank. folder: where ranks meet and leave their results."""

    ranks: int
    steps: int
    backend: str
    device: str
    folder: str
    drawing: str


def run_demo(ranks: int, steps: int, backend: str | None, drawing: Path) -> int:
    """Train in one process, then on `ranks` local ranks; print plan, losses and memory; draw the plan.

    NCCL with one GPU per rank where there are GPUs (then at most that many ranks), else gloo on the
    CPU. Returns 0 if the losses agree to 1e-4 relative (1e-2 on a GPU, whose matrix products round
    differently), 1 if not.
    """
    gpus = torch.cuda.device_count()
    device = "cuda" if gpus else "cpu"
    ranks = min(ranks, gpus) if gpus else ranks
    backend = backend or ("inductor" if gpus else "eager")
    config = GPTConfig()
    print(f"a GPT of {config.layers} layers, width {config.width}, on the Python language reference")
    print(f"{ranks} ranks over {'NCCL' if gpus else 'gloo'}, backend {backend}", flush=True)
    alone = _train(_model(config, device), config, steps, device)
    with tempfile.TemporaryDirectory() as folder:
        demo = DemoRun(ranks, steps, backend, device, folder, str(drawing.absolute()))
        mp.start_processes(_rank_main, args=(demo,), nprocs=ranks, start_method="spawn")
        reports = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return _print_report(alone, reports, drawing, 1e-2 if gpus else 1e-4)


def _model(config: GPTConfig, device: str) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(device)


def _train(model: nn.Module, config: GPTConfig, steps: int, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for tokens, targets in batches(config, _BATCH, steps):
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _rank_main(rank: int, demo: DemoRun) -> None:
    from autoshard.api import autoshard

    torch.set_num_threads(1)
    options: dict[str, Any] = {"backend": "gloo"}
    if demo.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    store = dist.FileStore(f"{demo.folder}/store", demo.ranks)
    dist.init_process_group(**options, store=store, rank=rank, world_size=demo.ranks)
    try:
        report = _train_rank(autoshard, demo)
        (Path(demo.folder) / f"rank{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _train_rank(autoshard: Any, demo: DemoRun) -> dict[str, Any]:
    config = GPTConfig()
    mesh = init_device_mesh(demo.device, (demo.ranks,), mesh_dim_names=("ranks",))
    model = _model(config, demo.device)
    example = tuple(tensor.to(demo.device) for tensor in batches(config, _BATCH, 1)[0])
    start = time.perf_counter()
    # Nominal prices: the demo shows the same plan everywhere, and measures nothing.
    autoshard(model, mesh, example, backend=demo.backend, profile=nominal_profile(demo.device))
    planned = time.perf_counter() - start
    start = time.perf_counter()
    losses = _train(model, config, demo.steps, demo.device)
    seconds = time.perf_counter() - start
    report = {
        "losses": losses,
        "setup_seconds": planned,
        "train_seconds": seconds,
        "bytes": _state_bytes(model),
    }
    if dist.get_rank() == 0:
        plan = cast("Plan", model.autoshard_plan)
        plan.draw(demo.drawing)
        report |= {"plan": plan.to_text(), "summary": plan.explain()}
    return report


def _state_bytes(model: nn.Module) -> int:
    """Bytes of this rank's parameter shards with gradient and AdamW's two states."""
    total = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += 4 * local.numel() * local.element_size()
    return total


def _print_report(alone: list[float], reports: list[dict[str, Any]], drawing: Path, tolerance: float) -> int:
    first = reports[0]
    print(first["plan"])
    print(first["summary"])
    print("step   one process   autoshard   relative difference")
    worst = 0.0
    for step, (one, many) in enumerate(zip(alone, first["losses"], strict=True)):
        difference = abs(one - many) / abs(one)
        worst = max(worst, difference)
        print(f"{step:4}   {one:11.6f}   {many:9.6f}   {difference:.1e}")
    print("\nparameters, gradients and AdamW state per rank")
    for rank, report in enumerate(reports):
        print(f"  rank {rank}: {format_bytes(report['bytes'])}")
    print(
        f"\nsetup {first['setup_seconds']:.1f} s, training {first['train_seconds']:.1f} s; plan drawn to {drawing}"
    )
    print("losses agree" if worst <= tolerance else f"losses DIFFER by {worst:.1e}")
    return 0 if worst <= tolerance else 1
