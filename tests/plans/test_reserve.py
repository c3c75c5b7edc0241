"""A memory limit holds CUDA's context and the communicators: the plan says how much, and keeps to it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import InfeasibleError, MeshSpec, Plan, find_plan
from autoshard.plan.judged import plan_reserve
from cost_model.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, PAIR_BYTES, PEER_BYTES
from passes.plan.planned_graph import Collective
from tests.models import TwoLinear
from tests.profiles import slow_compute

MESH = MeshSpec({"a": 2, "b": 4}, device_type="cuda")
SLOW_GPUS = replace(slow_compute(), device_type="cuda")
EVERY_PLAN = CONTEXT_BYTES + PAIR_BYTES + 2 * COMMUNICATOR_BYTES


def planned(mesh: MeshSpec, **options: Any) -> Plan:
    """One product, so that no plan has an all-to-all, whose messages would take more."""
    return find_plan(nn.Linear(10, 32), mesh, (torch.zeros(64, 10),), profile=SLOW_GPUS, **options)


def test_the_plan_states_it() -> None:
    plan = planned(MESH)
    used = {c.axes for c in plan.collectives}
    assert not any(c.kind == "all_to_all" for c in plan.collectives) and used <= {("a",), ("b",), ("a", "b")}
    assert plan.reserve == EVERY_PLAN
    assert plan.communicators == (("a", "b"), ("a",), ("b",))
    # 600 MB + 544 MiB + 2 * 688 MiB
    assert "and 2.613GB for CUDA's context and 3 communicators" in " ".join(plan.explain().split())
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_none_on_cpus() -> None:
    plan = find_plan(TwoLinear(), MeshSpec({"a": 2, "b": 4}), (torch.zeros(64, 10),), profile=slow_compute())
    assert plan.reserve == 0 and plan.communicators == ()
    assert "communicator" not in plan.explain()


def test_the_limit_holds_tensors_and_reserve() -> None:
    free = planned(MESH)
    least = free.peak_memory + free.reserve
    assert planned(MESH, memory_limit=least).peak_memory <= free.peak_memory
    with pytest.raises(InfeasibleError) as caught:
        planned(MESH, memory_limit=EVERY_PLAN + 100)
    text = str(caught.value)
    assert "and 2.613GB for CUDA's context and communicators" in text
    assert "try: memory_limit=2.614GB, which" in text  # 2.613GB as it is written would be less than that
    with pytest.raises(InfeasibleError, match=r"communicators alone take 2\.613GB"):
        planned(MESH, memory_limit="1GB")


def moved(kind: str, axes: tuple[str, ...], name: str = "") -> Collective:
    return Collective(kind, axes, 1000, 1e-3, "x", "y", "forward", name or kind)


def test_all_to_all_takes_more() -> None:
    around = [moved("all_reduce", ("a", "b")), moved("all_gather", ("b",))]
    assert plan_reserve(MESH, around) == EVERY_PLAN
    assert plan_reserve(MESH, [*around, moved("all_to_all", ("b",))]) == EVERY_PLAN + 3 * PEER_BYTES
    halo = moved("point_to_point", ("b",), "halo_exchange")
    assert plan_reserve(MESH, [halo, halo]) == EVERY_PLAN + 2 * PEER_BYTES
    assert plan_reserve(MESH, [moved("point_to_point", ("b",), "reshard")]) == EVERY_PLAN + 3 * PEER_BYTES
    assert plan_reserve(MESH, [moved("point_to_point", ("a",), "halo_exchange")]) == EVERY_PLAN + PEER_BYTES


@pytest.mark.slow
def test_the_reserve_is_of_the_plan_that_is_returned() -> None:
    """A limit that the fastest plan does not meet for its messages is met by another, or by states."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.zeros(512, 64)
    free = find_plan(model, MESH, (x,), profile=SLOW_GPUS)
    for share in (1.0, 0.9):
        limit = int(free.reserve + share * free.peak_memory)
        plan = find_plan(model, MESH, (x,), profile=SLOW_GPUS, memory_limit=limit)
        assert plan.peak_memory + plan.reserve <= limit
        assert plan.lower_bound <= plan.cost
