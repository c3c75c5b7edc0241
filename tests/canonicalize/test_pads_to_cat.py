from __future__ import annotations

import pytest
import torch

from passes.canonicalize.gradients import PadsToCat
from tests.canonicalize.graphs import Function, applied, ops, ramp


def rotated(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def test_the_gradient_of_rotary_halves_is_one_cat() -> None:
    after = applied(PadsToCat(), rotated, ramp(2, 8), grads=True)
    assert ops(after) == {"slice": 4, "neg": 2, "cat": 2}


def test_the_gradient_of_packed_query_key_value_is_one_cat() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x[:, 0], x[:, 1], x[:, 2]
        return q * k + v.exp()

    after = applied(PadsToCat(), function, ramp(2, 3, 4), grads=True)
    assert "constant_pad_nd" not in ops(after)
    assert ops(after)["cat"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, :3].sum() + x[:, 2:].exp().sum(),
        lambda x: x[:, :1].sum() + x[:, 2:].exp().sum(),
        lambda x: x[:1].exp().sum() + x[:, :2].sin().sum(),
    ],
    ids=["overlapping", "with a gap", "two dims"],
)
def test_pieces_that_do_not_tile_stay_a_sum(function: Function) -> None:
    after = applied(PadsToCat(), function, ramp(2, 4), grads=True)
    assert ops(after)["constant_pad_nd"] == 2 and "cat" not in ops(after)
