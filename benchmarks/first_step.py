"""How soon the first step ends, and what steps take while a plan is tuned beside them and after it.

    torchrun --nproc-per-node 2 -m benchmarks.first_step [--layers 12 --width 768] [--tune first] [--backend eager]

A GPT is trained with defaults until it is tuned (`is_tuned`), and for as many steps again; then another of the same
size under eager DDP. Run it twice: the second start takes plan and programs from $XDG_CACHE_HOME and Inductor's cache.
Seconds are rank 0's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard.demo import GPT, GPTConfig

STEPS = 50
"""Steps from which a median is taken, before and after."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--tune", default="background")
    parser.add_argument("--most", type=float, default=300.0, help="seconds of tuning, at most")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    tokens = torch.randint(0, 256, (given.rows, given.tokens), generator=torch.Generator().manual_seed(3))
    begun = time.perf_counter()
    model = autoshard.autoshard(_model(given), mesh, backend=given.backend, tune=given.tune)
    step = partial(_step, model, torch.optim.AdamW(model.parameters()), tokens)
    step()
    first = time.perf_counter() - begun
    during: list[float] = []
    tuning = time.perf_counter()
    while not autoshard.is_tuned(model):
        during.append(step())
        if _is_over(time.perf_counter() - tuning > given.most):
            break
    took = time.perf_counter() - tuning
    after = [step() for _ in range(STEPS)]
    if dist.get_rank() == 0:
        print(f"first step after {first:.1f} s; tuned {took:.1f} s later, {len(during)} steps")
        print(f"step after: median {statistics.median(after) * 1e3:.1f} ms, most {max(after) * 1e3:.1f} ms")
        if during:
            print(
                f"step during: median {statistics.median(during) * 1e3:.1f} ms, most {max(during) * 1e3:.1f} ms"
            )
    _ddp(given, tokens)
    dist.barrier()


def _ddp(given: argparse.Namespace, tokens: torch.Tensor) -> None:
    """Each rank has its part of the same batch."""
    begun = time.perf_counter()
    model = DistributedDataParallel(_model(given))
    own = tokens.tensor_split(dist.get_world_size())[dist.get_rank()]
    step = partial(_step, model, torch.optim.AdamW(model.parameters()), own)
    step()
    first = time.perf_counter() - begun
    steps = [step() for _ in range(STEPS)]
    if dist.get_rank() == 0:
        print(f"eager DDP: first step after {first:.1f} s, median {statistics.median(steps) * 1e3:.1f} ms")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin


def _model(given: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(context=given.tokens, width=given.width, layers=given.layers))


def _is_over(mine: bool) -> bool:
    """Rank 0's word."""
    said = torch.tensor(float(mine))
    dist.broadcast(said, 0)
    return bool(said)


if __name__ == "__main__":
    main()
