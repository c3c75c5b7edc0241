"""Predicted memory: model state halves as ranks double, and a limit decides between plans."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from autoshard import InfeasibleError, MeshSpec, Plan, find_plan
from autoshard.plan.plan_ends import Constraints
from tests.models import SwiGLU
from tests.plans.patterns import Regression

WIDTH = 8192
STATE = 3 * WIDTH * WIDTH * 4 * 4  # three float32 matrices, each with gradient and AdamW's two states


def wide_swiglu() -> nn.Module:
    with torch.device("meta"):
        return Regression(SwiGLU(WIDTH, WIDTH))


def planned(ranks: int, memory_limit: int, constraints: Constraints | None = None) -> Plan:
    x = torch.empty(8, WIDTH, device="meta")
    mesh = MeshSpec({"ranks": ranks})
    return find_plan(wide_swiglu(), mesh, (x, x), memory_limit=memory_limit, constraints=constraints)


def state_nbytes(plan: Plan, model: nn.Module) -> int:
    """Bytes of parameters, gradients and AdamW states on the fullest rank, from the layouts alone."""
    return sum(
        4
        * parameter.element_size()
        * math.prod(plan.parameter_layouts[name].max_local_shape(parameter.shape, plan.mesh))
        for name, parameter in model.named_parameters()
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_model_state_halves_as_ranks_double(ranks: int) -> None:
    plan = planned(ranks, memory_limit=int(1.3 * STATE / ranks))
    assert state_nbytes(plan, wide_swiglu()) * ranks == STATE
    # One gradient of a matrix is still in hand when its parameter's is counted, and little else.
    assert STATE / ranks <= plan.peak_memory <= 1.3 * STATE / ranks


def test_a_limit_that_only_a_sharded_plan_meets_yields_one() -> None:
    """Whole weights do not fit half the state, whatever else is done; the search then splits them."""
    with pytest.raises(InfeasibleError):
        planned(4, STATE // 2, constraints={"*": [Replicate()]})
    plan = planned(4, STATE // 2)
    assert plan.peak_memory <= STATE // 2
    assert state_nbytes(plan, wide_swiglu()) < STATE // 2


def test_a_limit_that_nothing_meets_is_an_error_that_names_what_binds() -> None:
    with pytest.raises(InfeasibleError) as error:
        planned(4, memory_limit=STATE // 4 - 1)
    text = str(error.value)
    assert "no plan fits memory_limit=" in text
    assert "body.w1.weight (with gradient and optimizer state)" in text
    assert "try: memory_limit=" in text
