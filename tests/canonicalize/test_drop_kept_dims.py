from __future__ import annotations

import torch

from passes.canonicalize.remove_noops import DropKeptDims
from tests.canonicalize.graphs import applied, ramp, text


def test_drop_kept_dims() -> None:
    after = applied(DropKeptDims(), lambda x: x.sum((0, 1), keepdim=True).view(4), ramp(2, 3, 4))
    assert text(after) == ["sum(x0, [0, 1], False) -> [4]"]


def test_a_reshape_that_does_more_stays() -> None:
    after = applied(DropKeptDims(), lambda x: x.sum(0, keepdim=True).view(12), ramp(2, 3, 4))
    assert len(text(after)) == 2


def test_a_reduction_that_others_read_stays() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.sum(0, keepdim=True)
        return total.view(3), x - total

    assert "sum(x0, [0], True) -> [1, 3]" in text(applied(DropKeptDims(), function, ramp(2, 3)))
