"""Two processes find the same plan: nothing depends on the order of sets of strings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHIN = """
import torch
from autoshard import MeshSpec, find_plan
from tests.models import SwiGLU

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([SwiGLU(64, 256)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(torch.nn.functional.layer_norm(x, x.shape[-1:]))
        return x.square().mean()

torch.set_num_threads(1)
plan = find_plan(Model(), MeshSpec({"dp": 2, "tp": 2}), (torch.zeros(16, 64),), memory_limit="500KB")
print(plan.fingerprint, plan.cost, plan.step_time)
"""
JOINED = """
import torch
from autoshard import MeshSpec, find_plan
from tests.models import TwoLinear
from tests.profiles import slow_compute

torch.set_num_threads(1)
many = MeshSpec(dict.fromkeys("abcde", 2))
plan = find_plan(TwoLinear(), many, (torch.zeros(8, 10),), profile=slow_compute())
print(plan.joined_axes, plan.fingerprint, plan.cost)
"""


@pytest.mark.parametrize(
    "program", [pytest.param(WITHIN, id="within"), pytest.param(JOINED, id="joined", marks=pytest.mark.slow)]
)
def test_the_same_plan_in_two_processes(program: str) -> None:
    root = Path(__file__).parents[2]

    def start(seed: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)

    processes = [start(seed) for seed in ("1", "2")]
    found = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert found[0] == found[1] != ""
