"""Programs for all sizes on simulated ranks: as one process, and what would not be is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard.verification.simulated_step as simulated
from autoshard import MeshSpec, Plan, PlanError, find_plan, verify
from autoshard.verification.simulated_step import ALL_SIZES, ALONE
from benchmarks.fuzz_sizes import checked
from passes.ir.torch_sizes import evaluation
from tests.profiles import slow_compute
from tests.verification.noted_runs import noted_runs


@pytest.mark.parametrize("number", [19, *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 30))])
def test_random_networks_at_five_sizes(number: int) -> None:
    """A part of `python -m benchmarks.fuzz_sizes`."""
    found = checked(number)
    assert not found.wrong and found.by.total() == 5
    assert number != 19 or found.by[ALL_SIZES] >= 2


@pytest.mark.slow
def test_a_guard_that_is_not_asked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for even sizes that run at all others."""
    unasked = lambda count, holds, codes: evaluation(count, [], codes)
    monkeypatch.setattr(simulated, "evaluation", unasked)
    assert any("off by" in line for line in checked(13).wrong)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.words(words)).square().mean()


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"x": 2}, {}),
        pytest.param({"x": 2}, {"micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"x": 2, "p": 2}, {"micro_batches": 2, "stages": "p"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_is_verified_at_other_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    by = noted_runs(monkeypatch)
    model, words = Net().double(), torch.randint(0, 12, (4, 6))
    plan = find_plan(model, MeshSpec(mesh), (words,), profile=slow_compute(), **options)
    sizes = [{"batch": 8}, {"batch": 12}, {"batch": 3, "sequence": 1}]
    report = verify(model, plan, (words,), sizes=sizes)
    assert report.ok and by == [ALONE, ALONE, ALL_SIZES, ALONE]
    assert len(report.errors) == 4 * len(verify(model, plan, (words,)).errors)
    assert sum(name.endswith(" at batch 3, sequence 1") for name in report.errors) == len(report.errors) / 4
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="loaded or unpickled"):
        verify(model, Plan.load(tmp_path / "plan.json"), (words,), sizes=sizes)
