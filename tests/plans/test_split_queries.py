"""Context parallelism: causal attention of a model with fewer heads than ranks splits its queries."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan, verify
from tests.plans.patterns import OneHead
from tests.profiles import slow_compute

RANKS, TOKENS = 3, 33  # 11 on each


def test_queries_are_split_and_keys_gathered() -> None:
    for masked in (False, True):
        check(masked)


def check(masked: bool) -> None:
    torch.manual_seed(0)
    model, spec = OneHead(masked).double(), MeshSpec({"cp": RANKS})
    given = torch.randn(1, TOKENS // RANKS, 32).double()
    split = {"in_placements": ((Shard(1),),), "out_placements": (Shard(1),)}
    plan = find_plan(model, spec, (given,), profile=slow_compute(), **split)  # type: ignore[arg-type]
    attentions = [record for record in plan.records if record.name.startswith("attention")]
    assert len(attentions) == 2
    assert all("s" in {split.factor for split in record.splits} for record in attentions)
    report = verify(model, plan, (torch.randn(1, TOKENS, 32).double(),))
    assert report.ok and report.max_error < 1e-12, str(report)
