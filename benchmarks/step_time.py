"""Step time on one device: autoshard's program against plain PyTorch, both eager or both compiled.

    python -m benchmarks.step_time                     # a small GPT, compiled; CUDA if there is a GPU, else the CPU
    python -m benchmarks.step_time --backend eager --model mlp --device cpu --steps 30

Both models live in one process and take their steps in turn, so that whatever else the machine does meets both
alike. A step is forward, backward and a fused AdamW update. Prints the medians and their ratio, by phase too (what the
host needs for it: on CUDA it runs ahead); then the same for a batch of one sample, nearly all of which is host time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import autoshard
from autoshard.demo import GPT, GPTConfig, batches
from benchmarks.racing.models import MLP, ConvNet
from benchmarks.step_cells import milliseconds

PHASES = ("forward", "backward", "update", "zero_grad")
PLAIN = {"eager": "PyTorch", "inductor": "torch.compile"}


@dataclass(frozen=True)
class Case:
    """batch: of a number of samples."""

    text: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    samples: int


def cases() -> Mapping[str, Case]:
    config = GPTConfig()
    image, hidden = (3, 32, 32), 1024
    return {
        "gpt": Case(str(config), lambda: GPT(config), lambda n: batches(config, n, 1)[0], 16),
        "mlp": Case(
            "MLP, 3 blocks 256-1024-256",
            lambda: MLP(256, 1024, 3),
            lambda n: (torch.randn(n, 256), torch.randn(n, 256)),
            256,
        ),
        "convnet": Case(
            "ConvNet, 24 channels on 32x32",
            lambda: ConvNet(24, 32, hidden, 10),
            lambda n: (torch.randn(n, *image), torch.randint(10, (n,))),
            16,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--backend", default="inductor", choices=tuple(PLAIN))
    parser.add_argument("--model", default="gpt", choices=tuple(cases()))
    parser.add_argument("--steps", type=int, default=30, help="of each, after warm-up")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--batch", type=int, help="samples; default: by model")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = cases()[arguments.model]
    name_of_device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU, 1 thread"
    print(f"torch {torch.__version__}, {name_of_device}, {case.text}, {arguments.steps} steps each")
    with tempfile.TemporaryDirectory() as folder:
        collectives = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(collectives, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            mesh = init_device_mesh(arguments.device, (1,), mesh_dim_names=("ranks",))
            for samples in (arguments.batch or case.samples, 1):
                compare(case, samples, mesh, arguments)
        finally:
            dist.destroy_process_group()


def compare(case: Case, samples: int, mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
    device, backend = arguments.device, arguments.backend
    batch = tuple(t.to(device) for t in case.batch(samples))
    torch.manual_seed(0)
    plain = case.build().to(device)
    ours = copy.deepcopy(plain)
    autoshard(ours, mesh, batch, profile="h100" if device == "cuda" else "cpu", backend=backend, tune="first")
    first, second = PLAIN[backend], "autoshard"
    trainers = {
        first: Trainer(plain if backend == "eager" else torch.compile(plain), plain, batch),
        second: Trainer(ours, ours, batch),
    }
    losses: dict[str, float] = {}
    for _ in range(arguments.warmup):
        losses = {name: trainer.step().item() for name, trainer in trainers.items()}
    for trainer in trainers.values():
        trainer.forget()
    seconds = in_turns(trainers, arguments.steps, device)
    print(f"batch of {samples}; losses after warm-up: {losses}")
    for name, values in seconds.items():
        median, quartiles = milliseconds(values, 2)
        print(f"  {name:14} median {median:>8} ms (quartiles {quartiles}); {trainers[name].phases()}")
    ratio = statistics.median(seconds[second]) / statistics.median(seconds[first])
    paired = statistics.median(a / b for a, b in zip(seconds[second], seconds[first], strict=True))
    print(f"  ratio of the medians {ratio:.3f}; median of the ratios turn by turn {paired:.3f}")


class Trainer:
    """Training steps of `model`, run through `call`."""

    def __init__(self, call: Callable[..., Tensor], model: nn.Module, batch: tuple[Tensor, ...]) -> None:
        self._call, self._batch = call, batch
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.forget()

    def forget(self) -> None:
        self._seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def step(self) -> Tensor:
        """The loss before the update."""
        marks = [time.perf_counter()]
        loss = self._call(*self._batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self._optimizer.step()
        marks.append(time.perf_counter())
        self._optimizer.zero_grad()
        marks.append(time.perf_counter())
        for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False):
            self._seconds[phase].append(end - begin)
        return loss.detach()

    def phases(self) -> str:
        medians = {phase: 1e3 * statistics.median(values) for phase, values in self._seconds.items()}
        return ", ".join(f"{phase} {median:.2f}" for phase, median in medians.items())


def in_turns(trainers: Mapping[str, Trainer], steps: int, device: str) -> dict[str, list[float]]:
    """Seconds of so many steps of each. Who goes first alternates: the second finds the caches the first left."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(steps):
        for name in list(trainers)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(timed(trainers[name], device))
    return seconds


def timed(trainer: Trainer, device: str) -> float:
    """Seconds of one step, finished on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    trainer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
