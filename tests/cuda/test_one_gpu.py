"""Whole models on one GPU: eager, Inductor and plain torch agree; verify; a laptop's plan; the host never waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoshard import MeshSpec, Plan, autoshard, find_plan, verify
from tests.cuda.programs import (
    PRECISIONS,
    Precision,
    copied,
    gradients,
    loss_of,
    prepared,
    relative_error,
    synchronisations,
)
from tests.profiles import slow_compute

pytestmark = pytest.mark.cuda

NAMES = ("llama", "gpt2", "bert", "vit", "unet", "convnext")
NOISE = 1e-3
"""Of the largest gradient: one below that is rounding (the bias of attention's keys cancels)."""


Results = dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """Loss and gradients in float64, and how far those of plain torch are from them, of their largest elements."""

    exact: Results
    plain: dict[str, float]

    @staticmethod
    def of(model: nn.Module, inputs: dict[str, Any], kind: Precision) -> Reference:
        wide = lambda t: t.double() if t.is_floating_point() else t
        exact = gradients(
            copied(model).double(), pytree.tree_map_only(Tensor, wide, inputs), PRECISIONS["float32"]
        )
        return Reference(exact, errors(gradients(copied(model), inputs, kind), exact))

    def check(self, got: Results, kind: Precision) -> float:
        """The largest error of `got`. No kernel adds in the order of another's, so torch's own error is allowed twice
        beside the tolerance."""
        found = errors(got, self.exact)
        over = {name: error - kind.tolerance - 2 * self.plain[name] for name, error in found.items()}
        worst = max(over, key=lambda name: over[name])
        assert over[worst] <= 0, f"{worst}: {found[worst]:.1e}, of plain torch {self.plain[worst]:.1e}"
        return max(found.values())


def errors(got: Results, wanted: Results) -> dict[str, float]:
    assert got.keys() == wanted.keys()
    floor = NOISE * max(float(v.abs().max()) for n, v in wanted.items() if n != "loss")
    return {name: relative_error(got[name], value, floor) for name, value in wanted.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_eager_and_inductor_compute_what_torch_does(
    mesh: DeviceMesh, name: str, precision: str, record_property: Callable[..., None]
) -> None:
    kind = PRECISIONS[precision]
    model, inputs = prepared(name, kind)
    reference = Reference.of(model, inputs, kind)
    for backend in ("eager", "inductor"):
        ours = copied(model)
        autoshard(ours, mesh, None, backend=backend, profile=slow_compute())
        record_property(backend, f"{reference.check(gradients(ours, inputs, kind), kind):.1e}")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "vit", "unet"])
def test_verify_on_the_gpu(name: str, precision: str, record_property: Callable[..., None]) -> None:
    """A plan for four GPUs, simulated on one with the values of a model that is there."""
    kind = PRECISIONS[precision]
    model, inputs = prepared(name, kind)
    spec = MeshSpec({"a": 2, "b": 2}, device_type="cuda")
    autocast = torch.bfloat16 if kind.autocast else None
    plan = find_plan(model, spec, ((), inputs), profile=slow_compute(), autocast=autocast)
    assert plan.collectives
    report = verify(model, plan, ((), inputs), autocast=autocast)
    record_property("error", f"{report.max_error:.1e}")
    assert report.ok, str(report)
    assert all(p.is_cuda for p in model.parameters())


def laptop_plan(name: str, precision: str, axes: str, path: Path) -> Plan:
    """The plan that a process without GPUs makes and saves."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MOCK_GPUS": "0"}
    environment.pop("LD_PRELOAD", None)  # a laptop has no imitation either
    command = [sys.executable, "-m", "tests.cuda.laptop", name, precision, axes, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Plan.load(path)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["llama", "vit", "unet"])
def test_a_plan_made_without_gpus_runs(mesh: DeviceMesh, name: str, precision: str, tmp_path: Path) -> None:
    kind = PRECISIONS[precision]
    plan = laptop_plan(name, precision, "a=1", tmp_path / "plan.json")
    model, inputs = prepared(name, kind)
    reference = Reference.of(model, inputs, kind)
    autoshard(model, mesh, None, plan=plan)
    reference.check(gradients(model, inputs, kind), kind)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_host_never_waits_in_a_step(
    mesh: DeviceMesh, dropout: float, backend: str, record_property: Callable[..., None]
) -> None:
    """Forward, backward and a fused update, after two of warm-up."""
    kind = PRECISIONS["bfloat16"]
    model, inputs = prepared("gpt2", kind, dropout=dropout)
    autoshard(model, mesh, None, backend=backend, profile=slow_compute())
    optimizer: list[torch.optim.Optimizer] = []

    def step() -> None:
        loss_of(model(**inputs)).backward()
        if not optimizer:
            optimizer.append(torch.optim.AdamW(model.parameters(), fused=True))
        optimizer[0].step()
        optimizer[0].zero_grad()

    for _ in range(2):
        step()
    waits = synchronisations(step)
    record_property("host synchronisations", len(waits))
    assert not waits, "\n".join(waits)


def test_a_wait_would_be_counted(mesh: DeviceMesh) -> None:
    assert len(synchronisations(lambda: torch.ones(1, device=mesh.device_type).item())) == 1
