from __future__ import annotations

import pytest
import torch

from passes.canonicalize.remove_noops import RemoveNoops
from tests.canonicalize.graphs import Function, applied, joint_of, ops, ramp, text


@pytest.mark.parametrize(
    "noop",
    [
        lambda x: x.detach(),
        lambda x: x.clone(),
        lambda x: x.contiguous(memory_format=torch.channels_last).contiguous(),
        lambda x: x.to(torch.float32),
        lambda x: x.expand(2, 3, 1, 1),
        lambda x: x.view(2, 3, 1, 1),
        lambda x: x.permute(0, 1, 2, 3),
        lambda x: x[:, 0:3],
        lambda x: x * 1.0,
        lambda x: x + 0,
        lambda x: x / 1,
        lambda x: x**1,
        lambda x: torch.cat([x]),
        lambda x: torch.cat([torch.empty(0), x]),
        lambda x: torch.nn.functional.pad(x, [0, 0]),
    ],
)
def test_a_noop_goes(noop: Function) -> None:
    assert ops(applied(RemoveNoops(), lambda x: noop(x).exp() * 2, ramp(2, 3, 1, 1)))["exp"] == 1
    assert set(ops(applied(RemoveNoops(), lambda x: noop(x).exp(), ramp(2, 3, 1, 1)))) == {"exp"}


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.to(torch.float64),
        lambda x: x[:, 1:],
        lambda x: x * 2,
        lambda x: x + 1,
        lambda x: torch.nn.functional.pad(x, [1, -1]),
        lambda x: x.view(3, 2),
    ],
)
def test_what_changes_something_stays(op: Function) -> None:
    assert len(text(applied(RemoveNoops(), op, ramp(2, 3)))) == 1


def test_an_integer_division_by_one_changes_the_dtype() -> None:
    assert set(ops(applied(RemoveNoops(), lambda x: x / 1, torch.arange(3)))) == {"div"}


def test_a_returned_copy_of_an_input_stays_a_copy() -> None:
    assert set(ops(RemoveNoops()(joint_of(lambda x: x.clone(), ramp(3), grads=False)))) == {"clone"}


def test_two_returned_copies_stay_apart() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, y.clone()

    assert ops(RemoveNoops()(joint_of(function, ramp(3), grads=False))) == {"exp": 1, "clone": 1}
