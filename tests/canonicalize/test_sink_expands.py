from __future__ import annotations

import torch

from passes.canonicalize.gradients import SinkExpands
from tests.canonicalize.graphs import applied, ops, ramp, text


def test_a_pointwise_op_broadcasts_by_itself() -> None:
    after = applied(SinkExpands(), lambda x, y: x.expand(2, 3) / 3 * y, ramp(2, 1), ramp(2, 3))
    assert text(after) == ["div(x0, 3) -> [2, 1]", "mul(div, x1) -> [2, 3]"]


def test_an_expand_that_is_still_needed_comes_last() -> None:
    after = applied(SinkExpands(), lambda x: x.expand(2, 3).exp(), ramp(2, 1))
    assert text(after) == ["exp(x0) -> [2, 1]", "expand(exp, [2, 3]) -> [2, 3]"]


def test_a_constant_with_dims_becomes_a_number() -> None:
    after = applied(SinkExpands(), lambda x: torch.where(x > 0, x, torch.zeros_like(x)), ramp(2, 3))
    assert "full([], 0) -> []" in text(after)
    assert ops(after) == {"gt": 1, "full": 1, "where": 1}


def test_a_number_does_not_promote_where_a_tensor_did() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((2, 3), 0.1, dtype=torch.float64)

    after = applied(SinkExpands(), function, ramp(2, 3))
    assert "full([2, 3], 0.1) -> [2, 3]" in text(after)


def test_the_gradient_of_a_mean_stays_small() -> None:
    after = applied(SinkExpands(), lambda x: x.exp().mean(), ramp(2, 3), grads=True)
    assert "expand" not in ops(after)
