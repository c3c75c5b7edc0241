"""Figures of the page benchmarks/results/gpu-results.md: `python -m benchmarks.gpu_figures NAME` prints one.

    python -m benchmarks.gpu_figures step          # step time against torch.compile, in one run
    python -m benchmarks.gpu_figures memory        # peak of a step, predicted and allocated
    python -m benchmarks.gpu_figures limits        # within less and less memory, beside checkpoints of blocks
    python -m benchmarks.gpu_figures kernels       # forward, backward, update: predicted and measured
    python -m benchmarks.gpu_figures prediction    # three models: predicted by timed kernels, measured, torch.compile
    python -m benchmarks.gpu_figures rates         # measured rates of this GPU beside the nominal profile's
    torchrun --nproc-per-node 8 -m benchmarks.gpu_figures parts        # the same as kernels, on all GPUs
    torchrun --nproc-per-node 8 -m benchmarks.gpu_figures nccl-tests --file all_reduce.txt

The model is the demo's GPT, larger. A step is forward, backward and AdamW.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import autoshard
from autoshard.demo import GPT, GPTConfig, batches
from autoshard.planning import started_mesh
from autoshard.profiling.startup import nominal_profile, startup_profile
from autoshard.reporting.report_steps import report
from benchmarks.gpu_memory import within_limits
from benchmarks.gpu_prediction import MODELS, compared
from benchmarks.step_cells import milliseconds
from benchmarks.step_time import Trainer, in_turns
from cost_model.collectives import CollectivePrices
from cost_model.memory import format_bytes
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile

CONFIG = GPTConfig(context=1024, width=1024, heads=16, layers=8)
BATCH = 8
WARMUP, STEPS = 5, 40
DTYPES = (torch.float32, torch.bfloat16)
SIZES = tuple(2**power for power in range(20, 31, 2))
"""Bytes of the collectives that are compared with nccl-tests: 1 MiB to 1 GiB."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=(*FIGURES, "nccl-tests"))
    parser.add_argument("--file", type=Path, help="what nccl-tests printed on this machine")
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")
    with started_mesh(None, "cuda") as mesh:
        if given.figure == "nccl-tests":
            nccl_tests(mesh, given.file)
        else:
            FIGURES[given.figure](mesh)
    return 0


def say(text: str) -> None:
    """From the first rank only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def model_and_call(dtype: torch.dtype, batch: int = BATCH) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    tokens, targets = (t.cuda() for t in batches(CONFIG, batch, 1)[0])
    return GPT(CONFIG).to("cuda", dtype), (tokens, targets)


def step(mesh: DeviceMesh) -> None:
    """Both models in one process, their steps in turn; who goes first alternates. The goal is a ratio of 1.02."""
    for dtype in DTYPES:
        plain, call = model_and_call(dtype)
        ours = copy.deepcopy(plain)
        autoshard(ours, mesh, call, profile=nominal_profile("cuda"), tune="first")
        steps = {
            "torch.compile": Trainer(torch.compile(plain), plain, call),
            "autoshard": Trainer(ours, ours, call),
        }
        for _ in range(WARMUP):
            losses = {name: trainer.step().item() for name, trainer in steps.items()}
        seconds = in_turns(steps, STEPS, "cuda")
        say(f"{short(dtype)}, {CONFIG}, batch {BATCH}, {STEPS} steps each; losses after warm-up {losses}")
        for name, values in seconds.items():
            median, quartiles = milliseconds(values, 2)
            say(f"  {name:14} median {median:>8} ms (quartiles {quartiles})")
        ratio = statistics.median(seconds["autoshard"]) / statistics.median(seconds["torch.compile"])
        say(f"  ratio of the medians {ratio:.3f}")


def memory(mesh: DeviceMesh) -> None:
    """The allocator's peak over a step, after one that made the optimizer's state."""
    say(f"{CONFIG}, batch {BATCH}; bytes at the peak of a step with AdamW")
    for dtype in DTYPES:
        for backend in ("eager", "inductor"):
            gc.collect()  # the last model's modules and its program refer to each other
            torch.cuda.empty_cache()
            model, call = model_and_call(dtype)
            autoshard(model, mesh, call, profile=nominal_profile("cuda"), backend=backend, tune="first")
            run = training_step(model, call)
            run()
            torch.cuda.reset_peak_memory_stats()
            run()
            peak, planned = torch.cuda.max_memory_allocated(), model.autoshard_plan.peak_memory
            say(
                f"  {short(dtype):9} {backend:9} planned {format_bytes(planned):>10}, "
                f"allocated {format_bytes(peak):>10}, ratio {planned / peak:.3f}"
            )
            del model, run


def training_step(model: nn.Module, call: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """AdamW as the plans count it: not fused."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> None:
        model(*call).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def limits(mesh: DeviceMesh) -> None:
    """The goals: every peak within its limit and within 10 % of the prediction; 1.0 of the checkpoints' step."""
    for line in within_limits(mesh, startup_profile(mesh), torch.bfloat16):
        say(line)


def kernels(mesh: DeviceMesh) -> None:
    """By the profile that is measured here at start-up, and by the shipped one that stands for GPUs."""
    measured = startup_profile(mesh)
    for profile in (measured, nominal_profile("cuda")):
        for backend in ("eager", "inductor"):
            model, call = model_and_call(torch.bfloat16, BATCH * dist.get_world_size())
            autoshard(model, mesh, call, profile=profile, backend=backend, tune="first")
            run = training_step(model, call)
            with report(model, warmup=WARMUP) as figures:
                for _ in range(WARMUP + 10):
                    run()
            say(f"bfloat16, {backend}\n{figures.text()}")


def prediction(mesh: DeviceMesh) -> None:
    """The goals are a ratio of 0.9 to 1.1 of the prediction, and 1.02 of torch.compile."""
    for workload in (build() for build in MODELS.values()):
        say(f"bfloat16, {workload.text}")
        say(f"  {compared(mesh, workload, torch.bfloat16)}")
        torch.cuda.empty_cache()


def rates(mesh: DeviceMesh) -> None:
    measured, nominal = startup_profile(mesh).device, nominal_profile("cuda").device
    say(
        f"kernel launch {1e6 * measured.launch_seconds:.1f} us; nominal {1e6 * nominal.launch_seconds:.1f} us"
    )
    here, there = measured.memory_bytes_per_second, nominal.memory_bytes_per_second
    say(f"memory {here / 1e12:.2f} TB/s; nominal {there / 1e12:.2f} TB/s, ratio {here / there:.2f}")
    for kind in ("matmul", "convolution", "attention"):
        for got in measured.rates(kind):
            best = max(got.flops_per_second)
            known = [max(r.flops_per_second) for r in nominal.rates(kind) if r.dtype == got.dtype]
            beside = f"; nominal {known[0] / 1e12:.1f}, ratio {best / known[0]:.2f}" if known else ""
            say(f"{kind} {got.dtype}: at best {best / 1e12:.1f} TFLOP/s{beside}")


def nccl_tests(mesh: DeviceMesh, file: Path) -> None:
    """Seconds of an all-reduce over all GPUs: the profile measured here, the file's, and their ratio."""
    spec = MeshSpec.of(mesh)
    mine = Profile.measure(
        mesh, time_budget=60.0, name="measured", command="benchmarks.gpu_figures nccl-tests"
    )
    theirs = Profile.from_nccl_tests(file, base=nominal_profile("cuda"))
    ours, read = CollectivePrices(mine, spec), CollectivePrices(theirs, spec)
    ratios: list[float] = []
    for nbytes in SIZES:
        pair = [prices.seconds("all_reduce", spec.names, nbytes) for prices in (ours, read)]
        ratios.append(pair[0] / pair[1])
        say(
            f"all_reduce {format_bytes(nbytes):>10}: measured {1e6 * pair[0]:10.1f} us, "
            f"nccl-tests {1e6 * pair[1]:10.1f} us, ratio {ratios[-1]:.2f}"
        )
    say(f"median ratio {statistics.median(ratios):.2f}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FIGURES: dict[str, Callable[[DeviceMesh], None]] = {
    "step": step,
    "memory": memory,
    "limits": limits,
    "kernels": kernels,
    "parts": kernels,
    "prediction": prediction,
    "rates": rates,
}

if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    sys.exit(main())
