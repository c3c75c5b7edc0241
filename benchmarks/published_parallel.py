"""Published runs with tensor, context, expert and pipeline parallelism: benchmarks/published/more.csv, as they ran.

Each row's words (`tp=4 pp=4 cp=2 dp=2 virtual=5`) are a configuration of the planner, and are priced as `autoshard
plan` prices one: the fastest plan with weights, sequences and experts so. Nothing that a run had beside the model is
added. "dp" are ranks of Megatron's distributed optimizer, which gathers and reduces once in a step; "fsdp" gathers in
each micro-batch, but in stages, where torchtitan and those who follow it keep what was gathered.

`python -m benchmarks.published_parallel` compares some as their frameworks are configured
(benchmarks/published/configurations) with others that would be faster, by `autoshard plan`. A row of a table for each.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autoshard.cli import main
from autoshard.planner.configuration import MODULES, RECOMPUTE, Configuration, again_words
from autoshard.planner.priced_runs import Machine, MetaModel, Run, Workload, configured_run
from autoshard.planner.readers import DISPATCHERS
from benchmarks.published_rows import CUDNN, Row, attending, gpu_profile, read_rows, run_name
from cost_model.profile import Profile
from passes.ir.routing import Routing

__all__ = ["ROWS", "ParallelRow", "parallel_rows"]

FOLDER = Path(__file__).parent / "published"
ROWS = FOLDER / "more.csv"
CONFIGURATIONS = FOLDER / "configurations"
_FILES = {
    "llama-3.1-405b-of-8-layers.megatron": "Llama-3.1-405B; tp=8 cp=2 dp=2",
    "nemotron-4-15b.megatron": "Nemotron-4-15B; tp=2",
    "llama-3-70b.toml": "Llama-3-70B; fsdp=32 tp=8",
    "llama-3-8b.toml": "Llama-3-8B; dp=16 tp=8",
    "qwen3-30b-a3b.toml": "Qwen3-30B-A3B; fsdp=8 ep=8 accumulation=16",
    "mpt-3b.yaml": "MPT-3B; dp=128",
}
"""Of every file the row's model and how it ran."""
WITH_TRANSFORMER_ENGINE = ("NVIDIA", "yanring/Megatron")
"""How sources begin whose runs attend by Transformer Engine, which takes cuDNN's attention on Hopper. [NVIDIA/NeMo pull
request 9188: "prefers cuDNN flash attention on Hopper+"; NVIDIA-NeMo/Automodel, docs/performance-summary.mdx: "TE"]"""


@dataclass(frozen=True)
class ParallelRow:
    """layers: of a model that was cut. rate: tokens a second of a GPU that were published, or None; flops: operations
    a second of a GPU, where that was published in its place. memory_gb: of the fullest GPU. said: as it ran, in the
    source's words."""

    model: str
    layers: int | None
    gpus: int
    gpu: str
    said: str
    configuration: Configuration
    rate: float | None
    flops: float | None
    memory_gb: float | None
    source: str
    note: str

    @property
    def name(self) -> str:
        layers = "" if self.layers is None else f" of {self.layers} layers"
        return run_name(f"{self.model}{layers}", self.configuration.sequence, self.gpus, self.gpu)

    @property
    def again(self) -> str:
        """What it computed again, in words."""
        again = self.configuration.recompute
        return "" if again == "none" else f"{again_words(again)} again"

    @property
    def transformers(self) -> dict[str, Any]:
        """Its model, as transformers configures it."""
        depth = {} if self.layers is None else {"num_hidden_layers": self.layers}
        return _models()[self.model.replace("-3.1-", "-3-")] | depth

    @property
    def profile(self) -> Profile:
        """The shipped one of its GPU, with the attention that it ran."""
        return attending(
            gpu_profile(self.gpu), CUDNN if self.source.startswith(WITH_TRANSFORMER_ENGINE) else 1.0
        )

    @mock.patch("time.monotonic", time.process_time)
    def predicted(self, seconds: float) -> Run:
        """A step as it ran. seconds: of processor time for each search."""
        model = MetaModel.of(self.transformers, torch.bfloat16)
        machine = Machine(self.profile, "cuda", None, "adamw, fp32 master", seconds)
        one = self.configuration
        return configured_run(Workload(model, one.batch, one.sequence, machine, self.gpus), one)

    def rate_of(self, run: Run) -> float:
        """Tokens a second of a GPU."""
        return self.configuration.batch * self.configuration.sequence / run.seconds / self.gpus

    def published(self, run: Run) -> float | None:
        """The same that was published, if it was; run: whose operations a token takes."""
        if self.flops is None:
            return self.rate
        tokens = self.configuration.batch * self.configuration.sequence
        return self.flops / (run.flops / tokens)


def _models() -> dict[str, dict[str, Any]]:
    """By name, as transformers configures them."""
    return json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))


def parallel_rows(path: Path = ROWS) -> list[ParallelRow]:
    with path.open(newline="", encoding="utf-8") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: Mapping[str, str]) -> ParallelRow:
    model, _, cut = line["model"].partition(", ")
    number = lambda name: float(line[name]) if line[name] else None
    gpus, sequence = int(line["gpus"]), int(line["sequence"])
    one = _configuration(line, gpus, sequence)
    tokens, step, rate, flops = (
        one.batch * sequence / gpus,
        number("step_seconds"),
        number("tokens_per_second_per_gpu"),
        number("model_tflops_per_gpu"),
    )
    return ParallelRow(
        model,
        int(cut.split()[0]) if cut else None,
        gpus,
        line["gpu"],
        line["parallelism"],
        one,
        tokens / step if step else rate,
        None if step or rate or not flops else flops * 1e12,
        number("memory_gb"),
        line["source"],
        line["note"],
    )


def _of_fsdp(row: Row) -> ParallelRow:
    """Of MPT in one micro-batch, as GPT-2 of its sizes."""
    line = dict.fromkeys(
        (
            "global_batch",
            "step_seconds",
            "model_tflops_per_gpu",
            "memory_gb",
            "dispatch",
            "gate",
            "source",
            "note",
        ),
        "",
    )
    line |= {
        "model": f"MPT-{row.model.upper()}",
        "gpus": str(row.gpus),
        "gpu": row.gpu,
        "parallelism": f"{'fsdp' if row.sharding == 'FULL_SHARD' else 'dp'}={row.gpus}",
        "micro_batch": str(row.micro_batch),
        "sequence": str(row.sequence),
        "recompute": row.checkpointing,
        "tokens_per_second_per_gpu": str(row.tokens_per_second),
    }
    return _row(line)


def _configuration(line: Mapping[str, str], gpus: int, sequence: int) -> Configuration:
    words = {name: size for name, _, size in (word.partition("=") for word in line["parallelism"].split())}
    size = lambda name: int(words.get(name) or 1)
    data = gpus // (size("tp") * size("pp") * size("cp"))
    batch = int(line["global_batch"] or 0)
    # Where it is not said: whole, and in stages one sequence at once.
    micro = int(line["micro_batch"] or (1 if size("pp") > 1 else batch // data))
    batch = batch or micro * data * size("accumulation")
    again = line["recompute"] or "none"
    if again not in RECOMPUTE and not set(again.split()) <= set(MODULES):
        raise ValueError(
            f"recompute of {line['model']} is {again!r}\n  try: one of {RECOMPUTE}, or of {MODULES}"
        )
    schedule = ("interleaved" if size("virtual") > 1 else "1f1b") if size("pp") > 1 else None
    return Configuration(
        "published",
        size("pp"),
        1,
        data,
        size("tp"),
        "fsdp" in words and size("pp") == 1,
        True,
        again,
        micro,
        size("accumulation") if "accumulation" in words else 0,
        batch,
        sequence,
        schedule,
        context=size("cp"),
        experts=size("ep"),
        virtual=size("virtual") if size("virtual") > 1 else 0,
        routing=_routing(line),
    )


def _routing(line: Mapping[str, str]) -> Routing:
    """In a row: a token has neighbouring experts, and the next token those behind. [NVIDIA-NeMo/Automodel,
    FakeBalancedGate]"""
    found = DISPATCHERS[{"deepep": "flex", "": "allgather"}.get(line["dispatch"], line["dispatch"])]
    if line["gate"] != "in a row":
        return found
    config = _models()[line["model"]]
    experts = config.get("num_experts") or config["n_routed_experts"]
    return replace(found, groups=(1, experts // config["num_experts_per_tok"]))


@dataclass(frozen=True)
class Configured:
    """A published run as its framework is configured: a file of `CONFIGURATIONS`, of the row with these words.

    Its suffix says which framework: .toml of torchtitan, .megatron of Megatron-LM, .yaml of accelerate."""

    file: str
    row: ParallelRow

    @property
    def framework(self) -> str:
        return {".toml": "torchtitan", ".megatron": "megatron", ".yaml": "accelerate"}[Path(self.file).suffix]

    @property
    def given(self) -> str:
        """What `autoshard plan` takes: a path, or Megatron's arguments."""
        path = CONFIGURATIONS / self.file
        return path.read_text(encoding="utf-8") if self.framework == "megatron" else str(path)

    @mock.patch("time.monotonic", time.process_time)
    def compared(self, seconds: float) -> str:
        """What `autoshard plan` prints of it, beside others. seconds: of processor time for each search."""
        row, printed = self.row, io.StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(printed):
            model, profile = Path(folder) / "config.json", Path(folder) / "profile.json"
            model.write_text(json.dumps(row.transformers), encoding="utf-8")
            row.profile.save(profile)
            options = {
                self.framework: self.given,
                "hf": model,
                "gpus": row.gpus,
                "batch": row.configuration.batch,
                "sequence": row.configuration.sequence,
                "profile": profile,
                "memory-limit": row.gpu.split("_")[1].upper(),
                "seconds": seconds,
            }
            arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
            if main(["plan", *arguments]):
                raise SystemExit(f"{self.file} was not compared")
        return printed.getvalue()


def configured_rows() -> Iterator[Configured]:
    rows = [
        *parallel_rows(),
        *(
            _of_fsdp(row)
            for row in read_rows(FOLDER / "mpt.csv")
            if row.model == "3b" and row.accumulation == 1
        ),
    ]
    for file, words in _FILES.items():
        (row,) = (one for one in rows if f"{one.model}; {one.said}" == words)
        yield Configured(file, row)


_RATE = re.compile(r"\(([\d,]+) of each device\)")


def table_row(one: Configured, printed: str) -> str:
    """| run | as configured | published | predicted | error | GB | autoshard's plan | better |: tokens a second of a
    GPU, and how much more than predicted of the configuration."""
    lines = {line[:11].strip(): line[12:] for line in printed.replace("\n" + " " * 12, " ").splitlines()}
    rate = lambda name: float(_RATE.search(lines[name])[1].replace(",", ""))  # type: ignore[index]
    published, predicted = one.row.rate or 0.0, rate("step")
    changes = lines["better"].rpartition(": ")[0]
    gain = lambda name: f"{rate(name):,.0f} ({rate(name) / predicted - 1:+.1%})"
    cells = (
        one.row.name,
        lines["runs"],
        f"{published:,.0f}",
        f"{predicted:,.0f}",
        f"{predicted / published - 1:+.1%}",
        lines["step"].split(", ")[-1],
        gain("autoshard"),
        f"{changes}: {gain('better')}" if changes != "as it is" else "none: it is the best",
    )
    return f"| {' | '.join(cells)} |"


def compare() -> None:
    parser = argparse.ArgumentParser(description="published runs as configured, and better")
    parser.add_argument("--only", default="", help="files with these words in their names")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each search, of processor time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for one in configured_rows():
        if arguments.only in one.file:
            printed = one.compared(arguments.seconds)
            print(printed, table_row(one, printed), sep="\n", flush=True)


if __name__ == "__main__":
    compare()
