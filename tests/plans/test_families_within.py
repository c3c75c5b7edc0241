"""Which families compete within a memory limit, and a plan that only they have."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import MeshSpec, find_plan
from autoshard.plan import task as module
from autoshard.plan.task import families_within
from autoshard.planning import canonical_capture

MESH = MeshSpec({"a": 4})


class Tied(nn.Module):
    """Nearly all that it holds is one weight, read first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.step = nn.Embedding(1000, 64), nn.Linear(64, 64)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
        state = torch.tanh(self.step(self.embedding(words)))
        return F.cross_entropy(state @ self.embedding.weight.t(), next_words)


WORDS = (torch.zeros(192, dtype=torch.int64), torch.zeros(192, dtype=torch.int64))


def test_all_of_small_graphs_one_of_larger_ones_and_none_of_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = canonical_capture(Tied(), WORDS, {}).joint
    found = list(families_within(joint, MESH))
    assert len(found) >= 4 and all(family.allowed for family in found)
    monkeypatch.setattr(module, "SMALL_NODES", len(joint.graph.nodes) - 1)
    assert len(list(families_within(joint, MESH))) == 1
    monkeypatch.setattr(module, "FEW_NODES", len(joint.graph.nodes) - 1)
    assert list(families_within(joint, MESH)) == []


def test_within_a_limit_a_family_may_be_the_plan() -> None:
    """What states make of the fastest plan takes 1.7 times as long in 70 % of its peak, FSDP's plan 1.26 times."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)))
    planned = lambda limit: find_plan(
        model,
        MESH,
        torch.randn(16, 32),
        profile="cpu",
        backend="eager",
        memory_limit=limit,
        constraints={"*": [Shard(0)]},
    )
    free = planned(None)
    plan = planned(int(0.7 * free.peak_memory))
    assert plan.memory_limit is not None and plan.peak_memory <= plan.memory_limit
    assert plan.step_time < 1.3 * free.step_time
