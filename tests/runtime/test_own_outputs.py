"""What a script may change in place of what a program returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.runtime.leaves import own_outputs


class Half(torch.autograd.Function):
    """The first rows of `a * a`, cut as a program cuts what it gathered. own: through `own_outputs`."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, own: bool) -> Tensor:
        square = a * a
        ctx.save_for_backward(a, square)
        cut = square[:2]
        return own_outputs([cut], [a])[0] if own else cut

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        a, _ = ctx.saved_tensors
        return torch.cat([gradient, torch.zeros_like(gradient)]) * 2 * a, None


def test_the_one_output_may_be_changed_in_place() -> None:
    a = torch.arange(8.0).view(4, 2).requires_grad_()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Half.apply(a, False).mul_(3.0)  # type: ignore[attr-defined]
    out: Any = Half.apply(a, True)
    assert out.mul_(3.0).tolist() == [[0.0, 3.0], [12.0, 27.0]]


def test_what_the_backward_reads_counts_as_changed() -> None:
    """As torch says of a plain model: `square` was saved, and lies in the memory of what is changed."""
    a = torch.arange(8.0).view(4, 2).requires_grad_()
    out: Any = Half.apply(a, True)
    out.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_other_views_stay() -> None:
    base, given, loss = torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(())
    cut = base[:2]
    free, scalar = own_outputs([cut, loss], [given])
    assert not free._is_view() and free.data_ptr() == cut.data_ptr() and scalar is loss
    for outputs in ([cut, cut.T], [cut, torch.zeros(3)], [base], [given[:2]], [loss]):
        assert all(a is b for a, b in zip(own_outputs(outputs, [given]), outputs, strict=True))
