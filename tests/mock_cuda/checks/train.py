"""One rank of a training job over NCCL; torchrun starts it, `jobs` and `laptop` read what it leaves.

torchrun --nproc-per-node 4 tests/mock_cuda/checks/train.py --model gpt --mesh 2,2 --backend eager
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import autoshard
from autoshard.demo import GPT, GPTConfig, batches
from tests.mock_cuda.checks.families import Example, MeanSquare, example

AXES = ("dp", "tp", "cp")
IMAGE = 1024  # rows and columns of the images, over all ranks


@dataclass(frozen=True)
class Job:
    """case: the call of one rank. options: of `autoshard`."""

    case: Example
    options: dict[str, Any] = field(default_factory=dict)


class Uneven(nn.Module):
    """Sizes that no axis divides. x: [10, 7]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 33)
        self.down = nn.Linear(33, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


class Convolutions(nn.Sequential):
    """Windows that reach over the ends of shards."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2),
            nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, padding=1),
        )  # fmt: skip


def _gpt(axes: tuple[str, ...], dtype: torch.dtype) -> Job:
    config = GPTConfig()
    return Job(Example(GPT(config).to(dtype), batches(config, 8, 1)[0], {}))


def _uneven(axes: tuple[str, ...], dtype: torch.dtype) -> Job:
    pins = {"up.weight": {axes[-1]: Shard(0)}, "down.weight": {axes[-1]: Shard(1)}}
    return Job(Example(Uneven().to(dtype), (torch.randn(10, 7, dtype=dtype),), {}), {"constraints": pins})


def _halos(axes: tuple[str, ...], dtype: torch.dtype) -> Job:
    """Every rank passes its rows and columns of the images. At this size halos are cheaper than whole images."""
    rows, columns = (IMAGE // n for n in (*_mesh_sizes(), 1)[:2])
    case = Example(MeanSquare(Convolutions()).to(dtype), (torch.randn(2, 3, rows, columns, dtype=dtype),), {})
    return Job(case, {"in_placements": ([Shard(2 + i) for i in range(len(axes))],)})


MODELS = {"gpt": _gpt, "uneven": _uneven, "halos": _halos}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt", help=f"{', '.join(MODELS)}, or FAMILY:KIND")
    parser.add_argument("--mesh", default="4")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--plan", help="of a file, instead of a search")
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args()


def _mesh_sizes() -> tuple[int, ...]:
    return tuple(int(size) for size in _arguments().mesh.split(","))


def main() -> None:
    arguments, sizes = _arguments(), _mesh_sizes()
    os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"  # as docs/cuda.md says for meshes of several axes
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=AXES[: len(sizes)])
    torch.manual_seed(0)
    if arguments.model in MODELS:
        job = MODELS[arguments.model](AXES[: len(sizes)], getattr(torch, arguments.dtype))
    else:
        job = Job(example(*arguments.model.split(":")))
    model, options = job.case.model.to(device), job.options
    args = tuple(a.to(device) for a in job.case.args)
    kwargs = {name: value.to(device) for name, value in job.case.kwargs.items()}
    prices = {"plan": arguments.plan} if arguments.plan else {"profile": "h100"}
    autoshard(model, mesh, (args, kwargs), backend=arguments.backend, **prices, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(arguments.steps):
        result = model(*args, **kwargs)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item()}")
    if dist.get_rank() == 0:
        names = Counter(str(collective.name) for collective in model.autoshard_plan.collectives)
        print("plan: " + ", ".join(f"{count} {name}" for name, count in names.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
