"""Bounds that errors print hold for programs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from autoshard import InfeasibleError, MeshSpec, find_plan
from benchmarks.fuzz_bounds import COUNTED, DO, NEEDS, examined
from tests.plans.test_infeasible import nbytes_of

DP2 = MeshSpec({"dp": 2})


def refused(model: nn.Module, rows: torch.Tensor, limit: int) -> str:
    with pytest.raises(InfeasibleError) as caught:
        find_plan(model, DP2, (rows,), profile="cpu", memory_limit=limit)
    return str(caught.value)


def test_what_any_plan_needs_by_hand() -> None:
    """The fewest bytes on 2 ranks: 48 of the weight, 96 of two states, 128 of the input, which is whole on both; beside
    them the product's half of 192, more than the gradient's 48."""
    text = refused(nn.Linear(4, 6, bias=False), torch.randn(8, 4), 100)
    assert text.startswith("no plan fits memory_limit=100B per device on mesh (dp=2)\n")
    assert "any plan needs at least 368B; the largest of what the search counts" in text


def test_no_plan_is_under_what_any_plan_is_said_to_need() -> None:
    """The search counts gradients from the first step on, 70.72 KB at 60,000; a program of 62,336 bytes is known."""
    layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    model, rows = nn.Sequential(*layers), torch.randn(16, 32)
    text = refused(model, rows, 60_000)
    assert text.startswith(
        "no plan was found that fits memory_limit=60KB per device on mesh (dp=2), nor proven"
    )
    said, fits = re.search(r"at least (\S+); ", text), re.search(r"try: memory_limit=(\S+), which", text)
    assert said and fits
    plan = find_plan(model, DP2, (rows,), profile="cpu", memory_limit=fits[1])
    assert nbytes_of(said[1]) <= plan.peak_memory <= nbytes_of(fits[1])


@pytest.mark.parametrize("number", [1])
def test_no_program_is_under_a_bound_of_small_models(number: int) -> None:
    """A part of `python -m benchmarks.fuzz_bounds`."""
    found = examined(number, drawings=4)
    assert {NEEDS, COUNTED} <= {one.kind for one in found.held}
    assert not found.under


def test_a_limit_that_an_error_offers_fits() -> None:
    """Found on the way to a smaller limit, in the least room that any states need."""
    found = examined(25, drawings=0)
    assert DO in {one.kind for one in found.held}
    assert not found.under
