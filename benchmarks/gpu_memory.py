"""A GPT on one GPU within less and less memory, beside torch.compile with every block under a checkpoint.

    python -m benchmarks.gpu_figures limits

First both checkpointing rivals are measured: no block, and every block, under `torch.utils.checkpoint`. Then autoshard
trains within shares of the first one's peak, and within just what the second was measured to take, in turns with it.
A peak is the allocator's of one whole step; a step is forward, backward and a fused AdamW.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoshard import InfeasibleError, MeshSpec, autoshard
from autoshard.demo import GPT, GPTConfig, batches
from benchmarks.step_time import Trainer, in_turns
from cost_model.memory import format_bytes, reserve_bytes
from cost_model.profile import Profile

__all__ = ["within_limits"]

CONFIG = GPTConfig(context=1024, width=1024, heads=16, layers=12)
BATCH = 16
ROWS = ((0.5, 1), (0.7, 1), (0.25, 2))
"""Shares of the peak of torch.compile without a checkpoint, and pieces of the batch."""
WARMUP, STEPS = 4, 15
SEARCH_SECONDS = 30.0


class CheckpointedGPT(GPT):
    """The same with every block under a checkpoint."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Step:
    """Bytes at the peak of a step, and the median of its seconds."""

    peak: int
    seconds: float

    def __str__(self) -> str:
        return f"peak {format_bytes(self.peak)}, step {1e3 * self.seconds:.1f} ms"


@dataclass(frozen=True)
class Setting:
    """mesh: of one GPU. call: on it."""

    mesh: DeviceMesh
    profile: Profile
    dtype: torch.dtype
    call: tuple[Tensor, ...]

    def compiled(self, kind: type[GPT]) -> Trainer:
        model = fresh(kind, self.dtype)
        return Trainer(torch.compile(model), model, self.call)

    def planned(self, room: int, pieces: int = 1) -> tuple[Trainer, str]:
        """A trainer whose tensors fit `room` bytes, and what its plan says."""
        model = fresh(GPT, self.dtype)
        options = {"memory_limit": room + reserve_bytes(MeshSpec.of(self.mesh)), "micro_batches": pieces}
        autoshard(
            model,
            self.mesh,
            self.call,
            profile=self.profile,
            time_limit=SEARCH_SECONDS,
            tune="first",
            **options,
        )
        plan = model.autoshard_plan
        said = (
            f"{len(plan.planned.again)} ops again, predicted peak {format_bytes(plan.peak_memory)}, "
            f"step {1e3 * plan.step_time:.1f} ms"
        )
        return Trainer(model, model, self.call), said

    def within(self, room: int, pieces: int, plain: Step) -> str:
        try:
            trainer, said = self.planned(room, pieces)
        except InfeasibleError as error:
            return str(error).splitlines()[0]
        step = measured(trainer)
        return f"{said}; {step}, {step.seconds / plain.seconds:.3f} of torch.compile's"

    def beside(self, room: int) -> str:
        """Steps in turns with those of the rival."""
        blocks = self.compiled(CheckpointedGPT)
        trainers = {"blocks": blocks, "ours": self.planned(room)[0]}
        in_turns(trainers, WARMUP, "cuda")
        middle = {name: statistics.median(s) for name, s in in_turns(trainers, STEPS, "cuda").items()}
        alone = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in middle.items())
        return f"in turns: {alone}; ratio {middle['ours'] / middle['blocks']:.3f}"


def within_limits(mesh: DeviceMesh, profile: Profile, dtype: torch.dtype) -> Iterator[str]:
    """Lines of the figure; `mesh`: of one GPU."""
    setting = Setting(mesh, profile, dtype, tuple(t.cuda() for t in batches(CONFIG, BATCH, 1)[0]))
    yield f"{CONFIG}, batch {BATCH}, {STEPS} steps"
    plain = measured(setting.compiled(GPT))
    yield f"torch.compile: {plain}"
    blocks = measured(setting.compiled(CheckpointedGPT))
    yield f"torch.compile, every block under a checkpoint: {blocks}, {blocks.seconds / plain.seconds:.3f} of it"
    yield f"within that, {format_bytes(blocks.peak)}: {setting.within(blocks.peak, 1, plain)}"
    yield setting.beside(blocks.peak)
    for share, pieces in ROWS:
        room = int(share * plain.peak)
        text = setting.within(room, pieces, plain)
        yield f"within {share:.0%}, {format_bytes(room)}, {pieces} piece{'s' if pieces > 1 else ''}: {text}"


def measured(trainer: Trainer) -> Step:
    """With nothing beside it on the GPU."""
    runs = {"": trainer}
    in_turns(runs, WARMUP, "cuda")
    torch.cuda.reset_peak_memory_stats()
    trainer.step()
    peak = torch.cuda.max_memory_allocated()
    return Step(peak, statistics.median(in_turns(runs, STEPS, "cuda")[""]))


def fresh(kind: type[GPT], dtype: torch.dtype) -> GPT:
    """A model with the same values each time, on a GPU that holds nothing of the last one."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    return kind(CONFIG).to("cuda", dtype)
