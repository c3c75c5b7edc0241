"""`print(plan)`: one screen, each axis by the name of its pattern."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, find_plan
from tests.profiles import slow_compute


def axes(plan: object) -> dict[str, str]:
    """Subject -> words, of each line."""
    return dict(line.split(maxsplit=1) for line in str(plan).splitlines())


def test_one_screen() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(512, 64)
    plan = find_plan(model, MeshSpec({"dp": 4}), (x,), profile=slow_compute(), memory_limit="100MB")
    said = axes(plan)
    assert list(said) == ["plan", "prices", "step", "memory", "proof", "dp", "more"]
    assert all(len(line) <= 140 for line in str(plan).splitlines())
    assert said["plan"] == "33.1 thousand parameters on mesh (dp=4) of cpu"  # 64 x 256 x 2 + 256 + 64
    assert "of 100MB" in said["memory"]


@pytest.mark.parametrize(
    ("placement", "words"), [(Replicate(), "DDP; batch split"), (Shard(0), "FSDP; batch split")], ids=str
)
def test_data_parallel(placement: object, words: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(4096, 64)
    pins = {"*": [placement]}
    plan = find_plan(model, MeshSpec({"dp": 4}), (x,), profile=slow_compute(), constraints=pins)
    assert axes(plan)["dp"] == words


def test_space() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.Conv2d(1, 1, 3, padding=1))
    plan = find_plan(model, MeshSpec({"sp": 2}), (torch.randn(1, 1, 64, 48),), profile=slow_compute(10_000))
    assert axes(plan)["sp"] == "FSDP; space split"


def test_stages() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    mesh, x = MeshSpec({"pp": 2, "dp": 2}), torch.randn(64, 32)
    plan = find_plan(model, mesh, (x,), profile=slow_compute(), stages="pp", micro_batches=4)
    said = axes(plan)
    assert said["pp"].startswith(f"pipeline: {len(plan.parts)} stages along pp, ")
    assert f"of 4 pieces, bubble {plan.bubble:.0%}" in said["pp"]
    assert said["dp"] == "tensor parallel"


def test_a_bound_is_said_as_one() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(512, 64)
    plan = find_plan(model, MeshSpec({"dp": 2}), (x,), profile=slow_compute())
    assert axes(plan)["proof"] == "optimal under these prices"
    far = replace(plan, cost=0.1, lower_bound=0.09)
    assert axes(far)["proof"] == "within 10.0% of optimal under these prices (bound 90 ms)"
    limited = replace(far, memory_limit=10**9)
    assert axes(limited)["proof"].startswith(
        "within 10.0% of the fastest plan without a limit under these prices"
    )
    assert axes(replace(far, lower_bound=0.0))["proof"].startswith("not known")
