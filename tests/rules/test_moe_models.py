"""Mixtures of experts as transformers writes them: planned with experts, tokens and widths split, and verified."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autoshard import MeshSpec, find_plan, verify
from tests.lower.test_own_rows import wire
from tests.profiles import slow_compute
from tests.rules.moe_models import MODELS

SLOW = [name for name in MODELS if name != "Qwen3-MoE"]


@pytest.mark.parametrize("name", ["Qwen3-MoE", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_planned_with_experts_split_and_right(name: str) -> None:
    """Weights stored by expert, and split as the search likes; equal to one process."""
    torch.manual_seed(0)
    model, ids = MODELS[name]().double(), torch.randint(0, 64, (4, 6))
    call = ((), {"input_ids": ids, "labels": ids})
    weights = [n for n, p in model.named_parameters() if ".experts." in n and p.ndim == 3]
    pins = {n: [Replicate(), Shard(0)] for n in weights}
    plan = find_plan(model, MeshSpec({"dp": 2, "ep": 2}), call, profile=slow_compute(100), constraints=pins)
    products = [node for node in plan.planned.nodes if node.op == "routed_mm"]
    assert len(products) == 4
    report = verify(model, plan, call)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"ep": 4}, {"dp": 2, "tp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_rows_travel_alone(name: str, axes: dict[str, int]) -> None:
    """Where bytes on the wire alone count."""
    torch.manual_seed(0)
    model, ids = MODELS[name]().double(), torch.randint(0, 64, (4, 6))
    call = ((), {"input_ids": ids, "labels": ids})
    weights = [n for n, p in model.named_parameters() if ".experts." in n and p.ndim == 3]
    pins = {n: [Shard(0) if axis == "ep" else Replicate() for axis in axes] for n in weights}
    plan = find_plan(model, MeshSpec(axes), call, profile=wire(), constraints=pins)
    assert any("_rows" in step.name for step in plan.collectives)
    report = verify(model, plan, call)
    assert report.ok, str(report)
