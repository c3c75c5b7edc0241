"""Listing layouts ends at the time limit too: meshes of many axes have more than can be listed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import passes.search.strategy_space as space
from autoshard import MeshSpec, find_plan
from cost_model.errors import InfeasibleError
from tests.profiles import slow_compute


def test_too_many_layouts_are_an_error_that_names_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    late = SimpleNamespace(monotonic=lambda: math.inf)
    monkeypatch.setattr(space, "time", late)
    mesh, x = MeshSpec({"a": 2, "b": 2}), torch.randn(8, 8)
    with pytest.raises(
        InfeasibleError, match=r"layouts on mesh \(a=2, b=2\)(.|\n)*time_limit(.|\n)*fewer axes than 2"
    ):
        find_plan(nn.Linear(8, 8), mesh, (x,), profile=slow_compute(), backend="eager")


def test_a_short_limit_still_leaves_time_to_list_and_to_search() -> None:
    mesh, x = MeshSpec({"a": 2}), torch.randn(8, 8)
    plan = find_plan(nn.Linear(8, 8), mesh, (x,), profile=slow_compute(), backend="eager", time_limit=0.5)
    assert plan.status in ("optimal", "feasible")
