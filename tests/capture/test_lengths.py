"""Functions whose results are as long as values say: torch's values, in a graph of fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import CaptureError
from passes.capture import capture
from tests.capture.running import check

Rest = Callable[[Tensor, Tensor], Any]


class Lengths(nn.Module):
    """A linear, then any function of (hidden [6, 3], counts [6])."""

    def __init__(self, rest: Rest) -> None:
        super().__init__()
        self.linear, self.rest = nn.Linear(4, 3), rest

    def forward(self, x: Tensor, counts: Tensor) -> Any:
        return self.rest(self.linear(x), counts)


def call() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4, dtype=torch.float64), torch.tensor([2, 0, 1, 0, 3, 0])


def told(h: Tensor, n: Tensor) -> Any:
    return torch.repeat_interleave(h, n, dim=0, output_size=6), torch.repeat_interleave(n, output_size=6)


def asked(h: Tensor, n: Tensor) -> Any:
    return (
        h.repeat_interleave(n[:3], 1),
        h.repeat_interleave(n[:1]) + h.repeat_interleave(2),
        torch.repeat_interleave(n[:0]),
    )


def distinct(h: Tensor, n: Tensor) -> Any:
    same = torch.tensor([[3, 1, 1], [0, 3, 3]]) + n[0]
    values, inverse, counts = torch.unique(same, return_inverse=True, return_counts=True)
    return h.sum() * values, inverse, counts, n.unique().shape[0] * h, torch.unique(n[:0])


def runs(h: Tensor, n: Tensor) -> Any:
    values, counts = torch.unique_consecutive((n > 1).long(), return_counts=True)
    return h.sum() * values, counts, n.unique_consecutive(return_inverse=True)[1]


def by_segment(h: Tensor, n: Tensor) -> Tensor:
    """Tokens of one row share what the row has: as packed batches of vision models do."""
    return (h[torch.repeat_interleave(torch.arange(6), n, output_size=6)] * h).sum()


@pytest.mark.parametrize("rest", [told, asked, distinct, runs, by_segment], ids=lambda rest: rest.__name__)
def test_values_and_gradients_are_torchs(rest: Rest) -> None:
    torch.manual_seed(0)
    check(Lengths(rest).double(), *call(), rtol=1e-12, atol=1e-12)


def test_plans_compute_the_same() -> None:
    model = Lengths(by_segment).double()
    plan = find_plan(model, MeshSpec({"x": 2}), call(), profile="cpu", refine="off", backend="eager")
    assert verify(model, plan, call()).ok and not plan.fallbacks


def test_lengths_that_do_not_fit() -> None:
    wrong: Rest = lambda h, n: h.repeat_interleave(n, 0, output_size=5)
    with pytest.raises(CaptureError, match=r"do not add up to output_size=5\n  at .*test_lengths"):
        capture(Lengths(wrong).double(), call(), {})
    unknown: Rest = lambda h, n: h.repeat_interleave(h[:, 0].abs().long(), 0)
    with pytest.raises(CaptureError, match=r"decides what runs next .*\n  at .*test_lengths"):
        capture(Lengths(unknown).double(), call(), {})


def test_combinations_are_torchs() -> None:
    def rest(h: Tensor, n: Tensor) -> Tensor:
        pairs = torch.combinations(torch.arange(6))
        triples = torch.combinations(h[0], 3, with_replacement=True)
        return (
            (h[pairs[:, 0]] * h[pairs[:, 1]]).sum()
            + triples.prod(1).sum()
            + torch.combinations(h[0], 1).sum()
        )

    check(Lengths(rest), torch.randn(6, 4), torch.tensor([1, 0, 2, 1, 1, 1]))
