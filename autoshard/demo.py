"""The demo: a GPT trained in one process, by hand on several ranks, and by autoshard; the page it prints."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autoshard.profiling.startup import nominal_profile
from cost_model.memory import format_bytes, format_seconds

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
        batch, length, _ = x.shape
        # Heads major: a split of the projection's rows by head keeps q, k and v of a head together.
        parts = self.query_key_value(self.norm1(x)).view(batch, length, self.heads, 3, -1)
        q, k, v = parts.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
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


def batches(config: GPTConfig, batch: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` random (tokens, targets) of int64 [batch, context]; the same on every rank."""
    data = torch.frombuffer(bytearray(demo_text()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - config.context - 1, (steps, batch), generator=generator)
    span = torch.arange(config.context)
    return [(data[s[:, None] + span], data[s[:, None] + span + 1]) for s in starts]


_CONFIG = GPTConfig(context=64, width=512, heads=8)
_BATCH = 4
"""Large weights and few tokens: splitting pays on two CPUs too."""
_WARM = 2
"""Steps before the timed ones."""


@dataclass(frozen=True)
class DemoRun:
    """Options of every rank. folder: where ranks meet and leave their results. drawing: of the plan, "" for none."""

    ranks: int
    steps: int
    backend: str
    device: str
    folder: str
    drawing: str


@dataclass(frozen=True)
class Trained:
    """losses: of every step. seconds: of a step, the median of those timed. nbytes: of this rank's weights, gradients
    and AdamW's states."""

    losses: list[float]
    seconds: float
    nbytes: int


def run_demo(
    ranks: int, steps: int, backend: str | None, drawing: Path | None = None, graph: bool = False
) -> int:
    """Train a GPT in one process, then on `ranks` local ranks by DDP, FSDP2, tensor parallelism by hand and autoshard,
    in turn; print step times, memory, whether losses agree, and the plan.

    drawing: the file that the plan is drawn to. graph: prints the planned graph as well.
    NCCL with one GPU per rank where there are GPUs (then at most that many ranks), else gloo on the CPU. Returns 0 if
    the losses agree to 1e-4 relative (1e-2 on a GPU, whose matrix products round differently), 1 if not.
    """
    gpus = torch.cuda.device_count()
    device = "cuda" if gpus else "cpu"
    ranks = min(ranks, gpus) if gpus else ranks
    backend = backend or ("inductor" if gpus else "eager")
    over = "GPUs over NCCL" if gpus else "processes of this machine over gloo"
    print(f"a GPT of {_CONFIG.layers} layers of {_CONFIG.width} on {ranks} {over}", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has
    try:
        alone = _train(_model(device), steps, device)
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        demo = DemoRun(
            ranks, steps, backend, device, folder, "" if drawing is None else str(drawing.absolute())
        )
        mp.start_processes(_rank_main, args=(demo,), nprocs=ranks, start_method="spawn")
        found = json.loads((Path(folder) / "trained.json").read_text())
        trained = {name: Trained(**one) for name, one in found.items()}
        plan, text = (Path(folder) / "plan.txt").read_text(), (Path(folder) / "graph.txt").read_text()
    print("\n".join(_report({"one process": alone, **trained})))
    worst = max(abs(a - b) / abs(a) for a, b in zip(alone.losses, trained["autoshard"].losses, strict=True))
    agree = worst <= (1e-2 if gpus else 1e-4)
    print(
        f"losses of autoshard and one process {'agree' if agree else 'DIFFER'}, to {worst:.0e}\n\n{plan}",
        end="",
    )
    if graph:
        print(f"\n{text}", end="")
    if drawing is not None:
        print(f"plan drawn to {drawing}")
    return 0 if agree else 1


def _report(trained: dict[str, Trained]) -> list[str]:
    lines = [f"{'':24} {'step':>9}   weights, gradients, AdamW"]
    for name, one in trained.items():
        loss = f"loss {one.losses[-1]:.4f} after {len(one.losses)} steps"
        lines.append(
            f"{name:24} {format_seconds(one.seconds):>9}   {format_bytes(one.nbytes):>9} a rank   {loss}"
        )
    return lines


def _model(device: str) -> GPT:
    torch.manual_seed(0)
    return GPT(_CONFIG).to(device)


def _train(
    model: nn.Module, steps: int, device: str, part: tuple[int, int] = (0, 1), group: Any = None
) -> Trained:
    """part: which of how many parts of a batch this rank passes. group: of the ranks that pass the others."""
    whole = {True: [], False: []}
    for parameter in model.parameters():  # torch updates no DTensors beside tensors
        whole[isinstance(parameter, DTensor)].append(parameter)
    optimizer = torch.optim.AdamW([{"params": some} for some in whole.values() if some], lr=1e-3)
    losses: list[float] = []
    times: list[float] = []
    for tokens, targets in batches(_CONFIG, _BATCH, steps + _WARM):
        start = time.perf_counter()
        mine = (tensor.chunk(part[1])[part[0]].to(device) for tensor in (tokens, targets))
        loss = model(*mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        if part[1] > 1:
            dist.all_reduce(value, group=group)
        losses.append(value.item() / part[1])
        times.append(time.perf_counter() - start)
    return Trained(losses, statistics.median(times[_WARM:]), _state_bytes(model))


def _rank_main(rank: int, demo: DemoRun) -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"backend": "gloo"}
    if demo.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options = {"backend": "nccl", "device_id": device}
    store = dist.FileStore(f"{demo.folder}/store", demo.ranks)
    dist.init_process_group(**options, store=store, rank=rank, world_size=demo.ranks)
    try:
        _train_rank(demo)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _train_rank(demo: DemoRun) -> None:
    """What rank 0 measured, for the process that started the ranks."""
    from autoshard.api import autoshard

    mesh = init_device_mesh(demo.device, (demo.ranks,), mesh_dim_names=("ranks",))
    trained: dict[str, Trained] = {}
    for name, (make, is_part) in RIVALS.items():
        if (_BATCH if is_part else _CONFIG.heads) % demo.ranks:
            continue  # what is split by hand is split evenly
        part = (mesh.get_local_rank(), demo.ranks) if is_part else (0, 1)
        trained[name] = _train(
            make(_model(demo.device), mesh), demo.steps, demo.device, part, mesh.get_group()
        )
    model = _model(demo.device)
    example = tuple(tensor.to(demo.device) for tensor in batches(_CONFIG, _BATCH, 1)[0])
    # Nominal prices: the demo shows the same plan everywhere, and measures nothing before its steps.
    prices = nominal_profile(demo.device)
    autoshard(model, mesh, example, backend=demo.backend, profile=prices, tune="first", refine="off")
    trained["autoshard"] = _train(model, demo.steps, demo.device)
    if dist.get_rank() == 0:
        plan, folder = cast("Plan", model.autoshard_plan), Path(demo.folder)
        (folder / "trained.json").write_text(json.dumps({name: vars(one) for name, one in trained.items()}))
        (folder / "plan.txt").write_text(str(plan))
        (folder / "graph.txt").write_text(plan.to_text())
        if demo.drawing:
            plan.draw(demo.drawing)


def _state_bytes(model: nn.Module) -> int:
    """Bytes of this rank's parameter shards with gradient and AdamW's two states."""
    held = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(4 * local.nbytes for local in held)


Make = Callable[[nn.Module, DeviceMesh], nn.Module]
"""Makes the demo's GPT parallel, in place."""


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in cast(Any, model.blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Megatron's: attention by heads, the MLP by columns and rows; all else on every rank."""
    column, row = ("query_key_value", "up"), ("projection", "down")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in column}
    plan |= {name: RowwiseParallel() for name in row}
    for block in cast(Any, model.blocks):
        parallelize_module(block, mesh, plan)
        block.heads //= mesh.size()  # a rank sees its own
    return model


RIVALS: dict[str, tuple[Make, bool]] = {
    "DDP": (data_parallel, True),
    "FSDP2": (fully_sharded, True),
    "tensor parallel by hand": (tensor_parallel, False),
}
"""Name -> how the model is made parallel, and whether each rank passes a part of the batch."""
