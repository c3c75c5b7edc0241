"""Step time on one device: autoshard's program against plain torch.compile of the same model.

    python benchmarks/step_time.py                 # CUDA if there is a GPU, else the CPU
    python benchmarks/step_time.py --device cpu --steps 30

Both models live in one process and take their steps in turn, so that whatever else the machine does meets both
alike. A step is forward, backward and a fused AdamW update. Prints the medians and their ratio.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import autoshard
from autoshard.demo.model import GPT, GPTConfig, batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--steps", type=int, default=30, help="of each, after warm-up")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = GPTConfig(width=arguments.width, layers=arguments.layers, context=arguments.context)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            compare(config, arguments)
        finally:
            dist.destroy_process_group()


def compare(config: GPTConfig, arguments: argparse.Namespace) -> None:
    device = arguments.device
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("ranks",))
    tokens, targets = (t.to(device) for t in batches(config, arguments.batch, 1)[0])
    torch.manual_seed(0)
    plain = GPT(config).to(device)
    ours = copy.deepcopy(plain)
    autoshard(ours, mesh, (tokens, targets), profile="h100" if device == "cuda" else "cpu")
    steps = {
        "torch.compile": trainer(torch.compile(plain), plain, tokens, targets),
        "autoshard": trainer(ours, ours, tokens, targets),
    }
    for _ in range(arguments.warmup):
        losses = {name: step().item() for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.steps):
        # Who goes first alternates: the second finds the caches the first left.
        for name in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            seconds[name].append(timed(steps[name], device))
    name_of_device = torch.cuda.get_device_name() if device == "cuda" else "CPU, 1 thread"
    print(
        f"torch {torch.__version__}, {name_of_device}, {config}, batch {arguments.batch}, {arguments.steps} steps each"
    )
    print(f"losses after warm-up: {losses}")
    for name, values in seconds.items():
        low, middle, high = (1e3 * quartile for quartile in statistics.quantiles(values, n=4))
        print(f"  {name:14} median {middle:8.2f} ms (quartiles {low:.2f}, {high:.2f})")
    ratio = statistics.median(seconds["autoshard"]) / statistics.median(seconds["torch.compile"])
    paired = statistics.median(
        a / b for a, b in zip(seconds["autoshard"], seconds["torch.compile"], strict=True)
    )
    print(f"  ratio of the medians {ratio:.3f}; median of the ratios turn by turn {paired:.3f}")


def trainer(
    call: Callable[..., torch.Tensor], model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """One training step of `model`, run through `call`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> torch.Tensor:
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(step: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of one step, finished on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
