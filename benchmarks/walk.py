"""How much of the code one plan goes through: what a newcomer would have to read to follow it.

    python -m benchmarks.walk                 # a GPT of one layer of 64 on 2 x 2 CPUs

Counts, of one `find_plan` in a process that has planned before: modules of the three packages in which a function is
called, weighted problems that the solver is given, and programs of candidates that are written.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from autoshard import MeshSpec, find_plan
from autoshard.demo import GPT, GPTConfig, batches

__all__ = ["walk"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("autoshard", "passes", "cost_model")
COUNTED: Mapping[str, tuple[str, str]] = {
    "calls of solve": ("passes/solver/solve.py", "solve"),
    "programs": ("passes/lower/partition.py", "partition"),
}


def walk(layers: int = 1) -> dict[str, int]:
    """Modules, calls of solve and programs of one plan."""
    config = GPTConfig(context=64, width=64, heads=4, layers=layers)
    model, call = GPT(config), batches(config, 16, 1)[0]
    planned = lambda: find_plan(model, MeshSpec({"dp": 2, "tp": 2}), call, profile="cpu")
    planned()  # what is imported and made once is no part of it
    profile = cProfile.Profile()
    profile.runcall(planned)
    stats = cast(Mapping[tuple[str, int, str], tuple[Any, ...]], pstats.Stats(profile).stats)  # type: ignore[attr-defined]
    calls: dict[tuple[str, str], int] = {}
    for (file, _, function), counts in stats.items():
        path = Path(file)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            name = path.relative_to(ROOT).as_posix(), function
            calls[name] = calls.get(name, 0) + int(counts[1])
    modules = {file for file, function in calls if function != "<module>"}
    return {"modules": len(modules)} | {name: calls.get(key, 0) for name, key in COUNTED.items()}


def main() -> None:
    torch.set_num_threads(1)
    for name, count in walk().items():
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()
