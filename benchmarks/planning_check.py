"""Does planning take as much work as it ever did? Small models, as counts of the functions they call.

python -m benchmarks.planning --check       # compares with benchmarks/planning_best.json; what CI runs
python -m benchmarks.planning --record      # writes into that file what is less than there

Counts are those of one run of `cProfile`, Python's functions and C's. They are the same on any machine and under any
load, where seconds of the same program were seen four times apart. What one call costs they do not say: the seconds
of each part are what the rest of `benchmarks.planning` shows. Many small steps up are seen, since counts are compared
with the best of each row and not with the last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from cProfile import Profile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard import MeshSpec, find_plan

__all__ = ["check", "failures", "record"]

BEST = Path(__file__).with_name("planning_best.json")

TOLERANCE = 1.25
"""What a count may grow by: what planning learns costs something, and other versions of Python and of torch call
other functions."""

Problem = tuple[nn.Module, tuple[Any, ...], dict[str, int]]


def check() -> list[str]:
    """A line for each model whose planning calls more functions than the best count recorded allows."""
    recorded = json.loads(BEST.read_text())
    found = _counts()
    for name, calls in found.items():
        print(f"{name}: {calls:,} calls, {recorded.get(name, 0):,} at best")
    return failures(found, recorded)


def record() -> None:
    """Counts that are lower than those recorded take their place."""
    recorded = json.loads(BEST.read_text())
    counts = {name: min(calls, recorded.get(name, calls)) for name, calls in _counts().items()}
    BEST.write_text(json.dumps(counts, indent=2) + "\n")


def failures(found: Mapping[str, int], recorded: Mapping[str, int]) -> list[str]:
    """Models whose count is more than `TOLERANCE` times the recorded one, or that have none, in sentences."""
    lines = [
        f"{name} takes {calls:,} calls to plan, more than {TOLERANCE} x {recorded[name]:,} at best"
        for name, calls in found.items()
        if name in recorded and calls > TOLERANCE * recorded[name]
    ]
    missing = [name for name in found if name not in recorded]
    return lines + [f"{name} has no figure recorded: run --record" for name in missing]


def _counts() -> dict[str, int]:
    return {name: _calls(make()) for name, make in _PROBLEMS.items()}


def _calls(problem: Problem) -> int:
    """Of the second of two plans: what is imported, compiled and remembered once is no planning."""
    _plan(problem)
    profile = Profile()
    profile.runcall(_plan, problem)
    return sum(entry.callcount for entry in profile.getstats())


def _plan(problem: Problem) -> None:
    model, inputs, mesh = problem
    find_plan(model, MeshSpec(mesh, device_type="cuda"), inputs, profile="h100", out_placements="keep")


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
