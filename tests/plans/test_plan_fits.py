"""A plan that is given, beside arguments that ask for another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard import MeshSpec, PlanError, find_plan
from autoshard.plan.find_plan import canonical_capture
from autoshard.plan.plan_fits import check_again
from autoshard.plan.stages_option import AnyPlan
from passes.ir.joint import JointGraph
from tests.profiles import slow_compute

ONE = MeshSpec({"x": 1})


class Blocks(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.relu()


def planned(checkpointed: bool, recompute: str = "auto", share: float | None = None) -> AnyPlan:
    model, x = Blocks(checkpointed), (torch.randn(64, 16),)
    plan = find_plan(model, ONE, x, profile=slow_compute(), recompute=recompute)
    if share is None:
        return plan
    limit = int(share * plan.peak_memory)
    return find_plan(model, ONE, x, profile=slow_compute(), memory_limit=limit, recompute=recompute)


def graph(checkpointed: bool) -> JointGraph:
    return canonical_capture(Blocks(checkpointed), (torch.randn(64, 16),), {}).joint


def test_it_computes_again_what_the_user_does_not() -> None:
    tight = planned(False, share=0.75)
    check_again(tight, "auto", graph(False))
    with pytest.raises(
        PlanError, match=r'recompute is "user", and plan computes \S+ again, .* does not'
    ) as said:
        check_again(tight, "user", graph(False))
    assert 'try: recompute="auto"' in str(said.value)


def test_it_computes_nothing_again_where_the_user_does() -> None:
    check_again(planned(True, "user"), "user", graph(True))
    with pytest.raises(PlanError, match="plan computes nothing again, while the model runs ops under"):
        check_again(planned(True), "user", graph(True))


def test_neither_computes_anything_again() -> None:
    check_again(planned(False), "user", graph(False))
