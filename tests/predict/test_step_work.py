"""The distinct kernels and collectives of a step."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from autoshard.plan.judged import prices_of
from autoshard.plan.plan import Plan
from autoshard.planning import canonical_capture, find_plan
from cost_model.mesh import MeshSpec, simulated_group_axes, simulated_groups
from passes.ir.joint import JointGraph
from passes.lower.rank_program import rank_program
from passes.predict.predict_program import predict_phases
from passes.predict.step_work import StepWork, step_work
from tests.profiles import slow_compute

MESH = MeshSpec({"x": 2})


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def planned(count: int) -> tuple[JointGraph, Plan]:
    model, inputs = Layers(count), (torch.randn(8, 32),)
    plan = find_plan(model, MESH, inputs, profile=slow_compute(), backend="eager")
    return canonical_capture(model, inputs, {}).joint, plan


def work_of(joint: JointGraph, plan: Plan, backend: str) -> tuple[StepWork, float, float]:
    """The step's work, and its seconds of computing and of collectives as the timeline has them."""
    prices = prices_of(slow_compute(), MESH, backend)
    program = rank_program(joint, plan.planned, MESH, 0, simulated_groups(MESH)).usual()
    work = step_work(program, prices, simulated_group_axes)
    step = predict_phases(program, prices, simulated_group_axes)
    phases = step.phases[:2]
    return work, sum(phase.compute for phase in phases), sum(phase.communication for phase in phases)


def test_equal_layers_are_timed_once_and_count_as_often_as_they_run() -> None:
    few, many = (work_of(*planned(count), "eager")[0] for count in (4, 8))
    assert {case.key for case in few.kernels} == {case.key for case in many.kernels}
    mine = {case.key: case.seconds for case in few.kernels}
    longest = many.kernels[0]
    assert longest.seconds >= 1.5 * mine[longest.key]


def test_its_seconds_are_the_step() -> None:
    work, compute, communication = work_of(*planned(3), "eager")
    kernels = sum(case.seconds for case in work.kernels)
    assert 0.8 * compute <= kernels <= compute * (1 + 1e-9)
    assert sum(case.seconds for case in work.collectives) == pytest.approx(communication)


def test_a_compiler_leaves_products_alone_and_all_else_is_timed_in_groups() -> None:
    joint, plan = planned(2)
    kernels = work_of(joint, plan, "inductor")[0].kernels
    assert {case.op for case in kernels if not case.fused} == {"autoshard.contract.default"}
    groups = {tuple(call.op for call in case.calls) for case in kernels if case.fused}
    assert any(len(ops) > 1 for ops in groups)
    assert all(len(case.inner) < len(case.calls) for case in kernels if case.fused)
    assert not any(case.fused for case in work_of(joint, plan, "eager")[0].kernels)


def test_weights_and_saved_values_are_cold() -> None:
    work, *_ = work_of(*planned(3), "eager")
    products = [case for case in work.kernels if "contract" in case.op]
    assert products and all(any(case.cold) for case in products)
    relus = [case for case in work.kernels if case.op == "aten.relu.default"]
    assert [case.cold for case in relus] == [(False,)] * len(relus)


def test_another_process_gets_them_whole() -> None:
    work, *_ = work_of(*planned(2), "eager")
    assert pickle.loads(pickle.dumps(work)) == work


def test_gradients_of_weights_outlive_their_phase() -> None:
    """Products that make a gradient; and what the forward saves."""
    joint, plan = planned(3)
    work, *_ = work_of(joint, plan, "eager")
    kept = {case.op for case in work.kernels if case.kept}
    assert {"autoshard.contract.default", "aten.relu.default"} <= kept


def test_a_case_knows_what_its_step_holds() -> None:
    joint, plan = planned(3)
    work, *_ = work_of(joint, plan, "eager")
    assert {case.step_nbytes for case in work.kernels} == {plan.peak_memory}
