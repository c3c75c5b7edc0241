"""Ops that are computed in the loop of an op that was timed: the loop was timed, and so were they."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planning import canonical_capture
from autoshard.refine.timed_cases import TimedCandidate, cases_of
from cost_model.mesh import MeshSpec
from cost_model.timed import TimedPrices
from tests.profiles import slow_compute
from tests.refine.tasks import timed


class Turned(nn.Module):
    """exp(-h) between two products: one loop, stored once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.exp(-self.one(x)))


def test_what_is_computed_in_a_timed_loop_is_timed() -> None:
    torch.manual_seed(0)
    captured = canonical_capture(Turned(), (torch.randn(8, 16),), {})
    one = Task(
        captured, slow_compute(), MeshSpec({"x": 2}), CallLayouts({}, {0: None}), {}, None, "inductor", 60.0
    )
    known = replace(one, timed=TimedPrices())
    plan = search_plan(known)
    assert {record.priced for record in plan.records if record.name in ("neg", "exp")} == {"modelled"}
    cases = cases_of(TimedCandidate.of(plan), known).unknown
    of_loops = replace(known, timed=timed(one, tuple(cases)))
    again = {record.name: record.priced for record in search_plan(of_loops).records}
    assert again["exp"] == again["neg"] == "timed"
