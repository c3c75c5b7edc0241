"""Whole models on meshes larger than this machine, every rank simulated: equal to the unsharded model."""

from __future__ import annotations

import pytest

from autoshard import MeshSpec, find_plan, verify
from tests.models import seeded
from tests.profiles import slow_compute

MESHES = {
    "8": MeshSpec({"a": 8}),
    "2x4": MeshSpec({"a": 2, "b": 4}),
    "2x2x2": MeshSpec({"a": 2, "b": 2, "c": 2}),
    "3": MeshSpec({"a": 3}),
    "5": MeshSpec({"a": 5}),
    "6": MeshSpec({"a": 6}),
}


NAMES = ("llama", "gpt2", "bert", "vit")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [  # in CI meshes of up to 6 with one model each, every model with one mesh or two
        pytest.param(
            name,
            mesh,
            marks=[] if i % len(NAMES) == NAMES.index(name) and mesh != "8" else [pytest.mark.slow],
        )
        for name in NAMES
        for i, mesh in enumerate(MESHES)
    ],
)
def test_plan_equals_the_unsharded_model(name: str, mesh: str) -> None:
    """Forward, loss and every gradient; batch 4 is split unevenly, or not at all, by 3, 5, 6 and 8."""
    model, inputs = seeded(name, layers=1)
    plan = find_plan(model, MESHES[mesh], ((), inputs), profile=slow_compute())
    report = verify(model, plan, ((), inputs))
    print(f"{name} on {mesh}: {report.max_error:.1e}, {len(plan.collectives)} collectives, {plan.status}")
    assert plan.collectives
    assert plan.fallbacks == ()
    assert report.ok, str(report)
    gradients = [result for result in report.errors if result.startswith("grad")]
    assert len(gradients) >= len(list(model.parameters()))
