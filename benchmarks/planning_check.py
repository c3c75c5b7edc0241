"""Does planning take as long as it ever did? Small models, as ratios to a fixed piece of work of the same run.

python -m benchmarks.planning --check       # compares with benchmarks/planning_best.json; what CI runs
python -m benchmarks.planning --record      # writes into that file what is less than there

Many small steps up are seen, since figures are compared with the best of each row and not with the last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard import MeshSpec, find_plan

__all__ = ["check", "failures", "record"]

BEST = Path(__file__).with_name("planning_best.json")

TOLERANCE = 2.0
"""What a ratio may grow by: CI's machines differ, and other work shares their caches. Within an hour ratios of one
program were seen 1.5 apart."""
TRIES = 4
"""Runs of which the least counts, as long as one is too slow: what else runs only makes it longer."""

Problem = tuple[nn.Module, tuple[Any, ...], dict[str, int]]


def check() -> list[str]:
    """A line for each model that takes longer than the best figure recorded."""
    recorded = json.loads(BEST.read_text())
    _warm_up()
    found = _ratios()
    for _ in range(TRIES - 1):
        if not failures(found, recorded):
            break
        again = _ratios()
        found = {name: min(ratio, again[name]) for name, ratio in found.items()}
    for name, ratio in found.items():
        print(f"{name}: {ratio:.2f} of the fixed work, {recorded.get(name, float('nan')):.2f} at best")
    return failures(found, recorded)


def record() -> None:
    """Of two runs the figures that are lower than those recorded take their place."""
    _warm_up()
    runs = [json.loads(BEST.read_text()), _ratios(), _ratios()]
    ratios = {name: round(min(run[name] for run in runs if name in run), 3) for name in runs[-1]}
    BEST.write_text(json.dumps(ratios, indent=2) + "\n")


def failures(found: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Models whose ratio is more than `TOLERANCE` of the recorded one, or that have none, in sentences."""
    lines = [
        f"{name} takes {ratio:.2f} of the fixed work to plan, "
        f"more than {TOLERANCE} x {recorded[name]:.2f} at best"
        for name, ratio in found.items()
        if name in recorded and ratio > TOLERANCE * recorded[name]
    ]
    missing = [name for name in found if name not in recorded]
    return lines + [f"{name} has no figure recorded: run --record" for name in missing]


def _warm_up() -> None:
    """What is imported and compiled once is no planning."""
    _planning(_convolutions())


def _ratios() -> dict[str, float]:
    unit = _cpu_seconds(_fixed_work)
    return {name: _planning(make()) / unit for name, make in _PROBLEMS.items()}


def _planning(problem: Problem) -> float:
    model, inputs, mesh = problem
    spec = MeshSpec(mesh, device_type="cuda")
    return _cpu_seconds(lambda: find_plan(model, spec, inputs, profile="h100", out_placements="keep"))


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _fixed_work() -> None:
    """Dicts, tuples and small arrays, as planning has them: about a second."""
    counts: dict[tuple[int, ...], int] = {}
    for i in range(1_000_000):
        key = (i % 977, i % 89)
        counts[key] = counts.get(key, 0) + 1
    table = np.arange(250_000, dtype=np.float64).reshape(500, 500)
    for _ in range(300):
        np.minimum(table[:, None, :50], table[None, :50, :50]).min(axis=2)


def _transformer() -> Problem:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        return model, (torch.zeros(64, 128, 256),), {"dp": 4, "tp": 2}


def _convolutions() -> Problem:
    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
            for _ in range(6)
        ]
        return nn.Sequential(*blocks), (torch.zeros(16, 32, 56, 56),), {"dp": 4}


def _products() -> Problem:
    with torch.device("meta"):
        return (
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)),
            (torch.zeros(512, 256),),
            {"dp": 4},
        )


_PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "two products, 4": _products,
    "transformer, 3 layers, 4 x 2": _transformer,
    "convolutions, 6 layers, 4": _convolutions,
}
