"""A plan that is given, beside arguments that ask for another one."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard import MeshSpec, PlanError, ShardingError, find_plan
from autoshard.plan.plan import Plan
from autoshard.plan.plan_fits import check_again, check_optimizer
from autoshard.planning import canonical_capture
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


def planned(checkpointed: bool, recompute: str = "auto", share: float | None = None) -> Plan:
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


@pytest.mark.parametrize("stages", [None, "x"])
def test_a_plan_says_whose_optimizer_it_counts(stages: str | None) -> None:
    """In its file as well; an older one does not say, and nor does a plan of a call that trains nothing."""
    options: dict[str, Any] = {"profile": slow_compute(), "optimizer": "sgd", "stages": stages}
    plan = find_plan(Blocks(False), MeshSpec({"x": 2}), (torch.randn(64, 16),), **options)
    data = json.loads(json.dumps(plan.to_json()))
    read = Plan.from_json(data)
    assert plan.origin.optimizer == read.origin.optimizer == "sgd"
    check_optimizer(read, "sgd")
    check_optimizer(read, None)
    with pytest.raises(ShardingError, match="optimizer is 'adam', and plan counts the states of 'sgd'"):
        check_optimizer(read, "adam")
    del data["origin"]["optimizer"]
    check_optimizer(Plan.from_json(data), "adam")
    with torch.no_grad():
        forward = find_plan(Blocks(False), MeshSpec({"x": 2}), (torch.randn(64, 16),), **options)
    assert "optimizer" not in forward.to_json()["origin"]
    check_optimizer(forward, "adam")


@pytest.mark.parametrize(
    ("counted", "named", "fits"),
    [
        ("adamw", "adam", True),  # as many states
        ("adamw", "adamw, fp32 master", False),
        ("sgd", "momentum", False),
        ("", "sgd", True),  # an older file
        ("adamw", None, True),
    ],
)
def test_an_optimizer_that_keeps_as_much(counted: str, named: str | None, fits: bool) -> None:
    plan = planned(False)
    made = replace(plan, origin=structs.replace(plan.origin, optimizer=counted))
    with (
        nullcontext()
        if fits
        else pytest.raises(ShardingError, match=f"plan counts the states of '{counted}'")
    ):
        check_optimizer(made, named)
