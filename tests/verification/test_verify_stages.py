"""`verify` of plans with stages: what every stage and rank computes, against the unsharded model."""

from __future__ import annotations

import pytest

from autoshard import MeshSpec, PipelinePlan, Plan, find_plan, verify
from autoshard.verification import simulated_step
from passes.ir.joint import JointGraph
from passes.lower.rank_program import RankProgram
from tests.profiles import slow_compute
from tests.runtime.test_stages import BATCH, CASES, made


def planned(name: str, axes: dict[str, int], count: int) -> PipelinePlan:
    example = CASES[name].call(BATCH)
    mesh = MeshSpec(axes, "cpu")
    plan = find_plan(
        made(name), mesh, example, profile=slow_compute(), stages="pp", micro_batches=count, backend="eager"
    )
    assert isinstance(plan, PipelinePlan)
    return plan


@pytest.mark.parametrize(
    ("name", "axes", "count"),
    [
        ("mlp", {"pp": 3, "tp": 2}, 4),
        ("gpt2-small", {"pp": 2, "tp": 2}, 5),
        ("unet", {"pp": 2, "dp": 3}, 1),
        pytest.param("gpt2-small", {"pp": 2, "dp": 2, "tp": 2}, 5, marks=pytest.mark.slow),
        pytest.param("t5", {"pp": 4, "tp": 2}, 4, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 4, "dp": 2, "tp": 2}, 5, marks=pytest.mark.slow),
    ],
)
def test_every_result_is_that_of_the_unsharded_model(name: str, axes: dict[str, int], count: int) -> None:
    plan = planned(name, axes, count)
    report = verify(made(name), plan, CASES[name].call(BATCH))
    assert report.ok and report.max_error < 1e-11
    trained = {f"grad {n}" for n, p in made(name).named_parameters() if p.requires_grad}
    assert trained <= set(report.errors)


def test_a_piece_that_runs_twice_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows in the place of the last."""
    plan = planned("mlp", {"pp": 2, "dp": 2}, 3)
    honest = simulated_step.rank_programs

    def twice(joint: JointGraph, stage: Plan) -> list[list[RankProgram]]:
        programs = honest(joint, stage)
        return [*programs[:-1], programs[0]]

    monkeypatch.setattr(simulated_step, "rank_programs", twice)
    report = verify(made("mlp"), plan, CASES["mlp"].call(BATCH))
    assert not report.ok and report.max_error > 0.01
