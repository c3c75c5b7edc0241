"""Published runs with tensor, context, expert and pipeline parallelism: benchmarks/published/more.csv, as they ran.

Each row's words (`tp=4 pp=4 cp=2 dp=2 virtual=5`) are a configuration of the planner, and are priced as `autoshard
plan` prices one: the fastest plan with weights, sequences and experts so. Nothing that a run had beside the model is
added. "dp" are ranks of Megatron's distributed optimizer, which gathers and reduces once in a step; "fsdp" gathers in
each micro-batch.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from autoshard.planner.configuration import RECOMPUTE, Configuration
from autoshard.planner.meta_models import MetaModel
from autoshard.planner.priced_runs import Machine, Run, configured_run
from benchmarks.published_rows import gpu_profile

__all__ = ["ROWS", "ParallelRow", "parallel_rows"]

FOLDER = Path(__file__).parent / "published"
ROWS = FOLDER / "more.csv"


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

    @mock.patch("time.monotonic", time.process_time)
    def predicted(self, seconds: float) -> Run:
        """A step as it ran. seconds: of processor time for each search."""
        values = dict(_models()[self.model.replace("-3.1-", "-3-")])
        if self.layers is not None:
            values["num_hidden_layers"] = self.layers
        model = MetaModel.of(values, torch.bfloat16)
        machine = Machine(gpu_profile(self.gpu), "cuda", None, "adamw, fp32 master", seconds)
        one = self.configuration
        return configured_run(model, one, one.batch, one.sequence, machine)

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


def _configuration(line: Mapping[str, str], gpus: int, sequence: int) -> Configuration:
    words = {name: size for name, _, size in (word.partition("=") for word in line["parallelism"].split())}
    size = lambda name: int(words.get(name) or 1)
    data = gpus // (size("tp") * size("pp") * size("cp"))
    batch = int(line["global_batch"] or 0)
    # Where it is not said: whole, and in stages one sequence at once.
    micro = int(line["micro_batch"] or (1 if size("pp") > 1 else batch // data))
    batch = batch or micro * data * size("accumulation")
    again = line["recompute"] or "none"
    if again not in RECOMPUTE:
        raise ValueError(f"recompute of {line['model']} is {again!r}\n  try: one of {RECOMPUTE}")
    schedule = ("interleaved" if size("virtual") > 1 else "1f1b") if size("pp") > 1 else None
    return Configuration(
        "published",
        size("pp"),
        1,
        data,
        size("tp"),
        "fsdp" in words,
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
    )
