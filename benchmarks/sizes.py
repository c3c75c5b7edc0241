"""What a size that was not seen before costs a step, in any order, and how often the model is captured and planned.

    python -m benchmarks.sizes --model unet --plan FSDP --ranks 2 3 --calls 20 [--dynamic batch height width]

A small model in float64 is called with sizes drawn by number, each `--repeats` times in random order, both ways. Prints
Markdown: captures, calls that were planned by a search (the first is), programs in symbols, the median last call, what
a size's first call takes above its last, at the median and at worst (calls that capture left out), calls that lowered a
program of their own, and how far losses and gradients are from one process's, as a share of the largest.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import autoshard
from autoshard.demo import GPT, GPTConfig
from autoshard.runtime import making, planner, sized_calls
from autoshard.runtime import session as sessions
from benchmarks.faults import free_port
from benchmarks.models import UNet, family_constraints

__all__ = ["main"]

WIDTH, WORDS = 16, 64


class ViT(nn.Module):
    """Images [b, 3, 16, 16] in patches of 4, one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return F.cross_entropy(self.head(self.layer(x)[:, 0]), labels)


class Translator(nn.Module):
    """An encoder and a decoder of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Transformer(WIDTH, 2, 1, 1, 4 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        x = self.layers(self.words(source), self.words(target), tgt_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.cells(self.words(tokens))[0]).flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Model:
    """batch: of sizes drawn from `sizes`."""

    make: Callable[[], nn.Module]
    batch: Callable[..., tuple[Tensor, ...]]
    sizes: Sequence[Sequence[int]]


def _tokens(*shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape)


def _gpt(layers: int) -> Model:
    return Model(
        lambda: GPT(GPTConfig(WORDS, 64, WIDTH, 2, layers)),
        lambda b, t: (_tokens(b, t), _tokens(b, t)),
        [range(2, 13), range(2, 41)],
    )


MODELS: Mapping[str, Model] = {
    "gpt": _gpt(layers=2),
    "gpt2": _gpt(layers=12),
    "unet": Model(
        lambda: UNet(8, 2, 4),
        lambda b, h, w: (torch.randn(b, 3, 4 * h, 4 * w), torch.randint(0, 4, (b, 4 * h, 4 * w))),
        [range(2, 9), range(2, 9), range(2, 9)],
    ),
    "vit": Model(ViT, lambda b: (torch.randn(b, 3, 16, 16), torch.randint(0, 10, (b,))), [range(2, 33)]),
    "translator": Model(
        Translator, lambda b, s, t: (_tokens(b, s), _tokens(b, t)), [range(2, 9), range(2, 21), range(2, 21)]
    ),
    "lstm": Model(Recurrent, lambda b, t: (_tokens(b, t),), [range(2, 13), range(2, 9)]),
}
COLUMNS, ROWS = ("*.up.weight", "*.linear1.weight"), ("*.down.weight", "*.linear2.weight")
"""Weights of the products behind attention, as the models above name them."""
SPLITS = {"sequence": (1, 1), "space": (2, 1)}
"""Plans whose inputs come split, and at which dim each."""
PARTS: Mapping[str, Mapping[str, Any]] = {
    "pieces": {"micro_batches": 2},
    "stages": {"micro_batches": 2, "stages": "ranks"},
}
"""Plans in pieces of a batch, and in stages too."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sizes", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--plan", nargs="+", choices=["free", "DDP", "FSDP", "TP", *SPLITS, *PARTS], default=["free"]
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--calls", type=int, default=20, help="sizes, each called `--repeats` times")
    parser.add_argument(
        "--repeats", type=int, default=2, help="calls of a size; with inductor the third compiles"
    )
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--dynamic", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    print(f"{given}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    columns = [
        "model",
        "plan",
        "ranks",
        "captures",
        "searches",
        "programs",
        "repeat ms",
        "median ms",
        "worst ms",
    ]
    columns += ["lowered", "difference"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    for model in given.model:
        for plan in given.plan:
            for ranks in given.ranks:
                mp.start_processes(  # type: ignore[no-untyped-call]
                    _rank, args=(ranks, model, plan, given, free_port()), nprocs=ranks
                )
    return 0


def _rank(rank: int, ranks: int, name: str, plan: str, given: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    torch.manual_seed(given.seed)
    example = MODELS[name]
    alone = example.make()
    counts: Counter[str] = Counter()
    _count(counts)
    options: dict[str, Any] = {"dynamic": set(given.dynamic)} if given.dynamic else {}
    if plan in SPLITS:
        count = len(example.batch(*(sizes[0] for sizes in example.sizes)))
        options["in_placements"] = [[Shard(dim)] for dim in SPLITS[plan][:count]]
    elif plan in PARTS:
        options |= PARTS[plan]
    elif plan != "free":
        names = [name for name, _ in alone.named_parameters()]
        pins = family_constraints(plan, 1, columns=COLUMNS, rows=ROWS)
        options["constraints"] = {pin: how for pin, how in pins.items() if fnmatch.filter(names, pin)}
    settings: dict[str, Any] = {"backend": given.backend, "profile": "cpu", "tune": "first", **options}
    model = autoshard.autoshard(copy.deepcopy(alone), mesh, **settings)
    seen: dict[tuple[int, ...], list[tuple[float, Counter[str]]]] = {}
    worst = 0.0
    for sizes in _drawn(example, given):
        torch.manual_seed(sum(sizes))
        batch = example.batch(*sizes)
        dims = SPLITS.get(plan)
        own = (
            batch
            if dims is None
            else tuple(t.chunk(ranks, d)[rank] for t, d in zip(batch, dims, strict=False))
        )
        before = counts.copy()
        dist.barrier()
        begin = time.perf_counter()
        loss = model(*own)
        loss.backward()
        seen.setdefault(sizes, []).append((time.perf_counter() - begin, counts - before))
        worst = max(worst, _difference(model, loss, alone, alone(*batch)))
    if rank == 0:
        again = statistics.median(last for *_, (last, _) in seen.values())
        new = [one - last for (one, did), *_, (last, _) in seen.values() if not did["captures"]]
        figures = [f"{1e3 * value:.0f}" for value in (again, statistics.median(new), max(new))]
        said = [counts["captures"], counts["searches"], counts["programs"]]
        lowered = sum(did["lowered"] > 0 for (_, did), *_ in seen.values())
        row = [name, plan, ranks, *said, *figures, lowered, f"{worst:.0e}"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _drawn(example: Model, given: argparse.Namespace) -> list[tuple[int, ...]]:
    draw = random.Random(given.seed)
    every = list(itertools.product(*example.sizes))
    chosen = draw.sample(every, min(given.calls, len(every)))
    calls = chosen * given.repeats
    draw.shuffle(calls)
    return calls


def _count(counts: Counter[str]) -> None:
    """What this process does from now on."""

    def counted(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            counts[what] += made is not None
            return made

        setattr(owner, name, call)

    counted(sessions, "canonical_capture", "captures")
    counted(planner.Planner, "first", "searches")
    counted(planner, "search_plan", "searches")
    counted(making, "_programs", "lowered")
    counted(sized_calls, "sized_program", "programs")


def _difference(model: nn.Module, loss: Tensor, alone: nn.Module, wanted: Tensor) -> float:
    """Of losses and gradients, as a share of the largest of each; both models are left without gradients."""
    wanted.backward()
    loss, wanted = loss.detach(), wanted.detach()
    pairs = [
        (loss, wanted),
        *((a.grad, b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True)),
    ]
    found = 0.0
    for one, other in pairs:
        assert one is not None and other is not None
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        found = max(found, float((whole - other).abs().max() / other.abs().max().clamp_min(1e-30)))
    model.zero_grad()
    alone.zero_grad()
    return found


if __name__ == "__main__":
    raise SystemExit(main())
