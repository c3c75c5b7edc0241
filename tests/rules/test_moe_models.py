"""Mixtures of experts as transformers writes them: planned with experts, tokens and widths split, and verified."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


class Padded(nn.Module):
    """Groups of rows, each with room to a multiple of 4, as kernels by blocks want them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        ids, order = chosen.reshape(-1).sort()
        counts = torch.bincount(ids, minlength=4)
        room = (counts + 3) // 4 * 4
        first, ends = (counts.cumsum(0) - counts)[ids], room.cumsum(0)
        places = torch.arange(len(ids)) - first + (ends - room)[ids]
        rows = x.new_zeros(len(ids) + 16, 8).index_copy(0, places, x[order // 2])
        hidden = F.grouped_mm(rows, self.up, offs=ends.to(torch.int32)).relu()
        made = F.grouped_mm(hidden, self.down, offs=ends.to(torch.int32))[places]
        return torch.zeros_like(x).index_add(0, order // 2, made * weights.reshape(-1)[order, None])


def test_rows_at_places_are_not_in_another_order() -> None:
    """A rank with some of the experts has the rows of these alone; what others are written to has all."""
    torch.manual_seed(0)
    model, x = Padded().double(), torch.randn(24, 8, dtype=torch.float64)
    pins = {"up": [Shard(0)], "down": [Shard(0)]}
    plan = find_plan(model, MeshSpec({"ep": 3}), (x,), profile=wire(), constraints=pins)
    report = verify(model, plan, (x,))
    assert report.ok, str(report)
