"""Hugging Face models whose forward asks for values: captured, planned on 2 x 2 and verified; two of them trained."""

from __future__ import annotations

import pytest
import torch

from autoshard import MeshSpec, find_plan, verify
from tests.profiles import slow_compute
from tests.ranks import RankPool
from tests.training.checked_models import EXAMPLES, trained

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", EXAMPLES)
def test_planned_and_verified(name: str) -> None:
    torch.manual_seed(0)
    model, call = EXAMPLES[name]()
    mesh = MeshSpec({"dp": 2, "tp": 2})
    plan = find_plan(model, mesh, ((), call), profile="cpu", refine="off")
    report = verify(model, plan, ((), call))
    assert report.ok, report


@pytest.mark.parametrize("name", ["llava", "mixtral", "qwen25vl"])
def test_trained_on_two_ranks(ranks: RankPool, name: str) -> None:
    """In float64, but for the losses of transformers. Qwen2.5-VL's steps are of two kinds: their padding differs."""
    wanted = trained(0, name)
    for run in ranks.run(trained, name, {"backend": "eager", "profile": slow_compute()}, world=2):
        assert run.losses == pytest.approx(wanted.losses, rel=1e-6)
        for key, value in wanted.parameters.items():
            torch.testing.assert_close(run.parameters[key], value, rtol=1e-6, atol=1e-6)
