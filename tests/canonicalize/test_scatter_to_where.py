from __future__ import annotations

import pytest
import torch

from passes.canonicalize.gradients import ScatterToWhere
from tests.canonicalize.graphs import Function, applied, ops, ramp

INDEX = torch.tensor([[2], [0]])


@pytest.mark.parametrize(
    ("function", "adds"),
    [
        (lambda x, i, v: x.scatter(1, i, -1.0), 0),
        (lambda x, i, v: x.scatter(1, i, v), 0),
        (lambda x, i, v: x.scatter_add(1, i, v), 1),
        (lambda x, i, v: torch.zeros_like(x).scatter_add(1, i, v), 0),
        (lambda x, i, v: x.t().contiguous().scatter(0, i.t(), 3.0), 0),
    ],
)
def test_one_element_a_row(function: Function, adds: int) -> None:
    after = applied(ScatterToWhere(), function, ramp(2, 4), INDEX, torch.tensor([[5.0], [6.0]]))
    assert not {"scatter", "scatter_add"} & set(ops(after))
    assert (ops(after)["where"], ops(after)["add"]) == (1, adds)


def test_the_gradient_of_a_gather_is_pointwise() -> None:
    after = applied(ScatterToWhere(), lambda x, i: x.gather(1, i), ramp(2, 4), INDEX, grads=True)
    assert set(ops(after)) == {"gather", "full", "arange", "eq", "where"}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x.scatter(1, i.expand(2, 3) % 4, 1.0),
        lambda x, i: x.scatter(1, i[:1], 1.0),
        lambda x, i: x.scatter_reduce(1, i, torch.ones(2, 1), "prod"),
    ],
)
def test_other_scatters_stay(function: Function) -> None:
    assert "where" not in ops(applied(ScatterToWhere(), function, ramp(2, 4), INDEX))
