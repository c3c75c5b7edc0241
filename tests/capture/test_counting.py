"""torch.histc and torch.bincount as primitives: torch's own counts, and a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import CaptureError
from passes.capture import capture
from passes.capture.answered_calls import histc
from tests.capture.running import check


@pytest.mark.parametrize("bins, low, high", [(4, 0.0, 3.0), (7, -1.0, 2.0), (3, 1.0, 9.0)])
def test_counts_are_torchs(bins: int, low: float, high: float) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.randint(-3, 12, (200,)).double(), torch.randn(50, dtype=torch.float64) * 3])
    assert torch.equal(histc(values, bins, low, high), torch.histc(values, bins, low, high))


def test_integers_are_counted_where_torch_refuses_them_on_cpus() -> None:
    experts = torch.tensor([[0, 3], [1, 3], [3, 2], [-1, 4]], dtype=torch.int32)
    counts = histc(experts, bins=4, min=0, max=3)
    assert counts.dtype == torch.int32 and counts.tolist() == [1, 1, 1, 3]


def test_calls_are_captured_as_primitives() -> None:
    class Routed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x, bins=3, min=0, max=2) + x.int().histc(3, 0, 2)

    graph = capture(Routed(), (torch.tensor([0.0, 2.0, 2.0]),), {}, device="cuda").joint.graph
    assert not any("histc" in str(node.target) for node in graph.nodes)


class Counts(nn.Module):
    """A linear to three experts, then counts of (scores [8, 3], labels [8])."""

    def __init__(self, count: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.count = nn.Linear(4, 3), count

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.count(self.gate(x), labels)


def loads(z: Tensor, y: Tensor) -> Tensor:
    """How often each expert is among the two that are chosen."""
    return (torch.bincount(z.topk(2)[1].flatten(), minlength=3) * z.softmax(-1).mean(0)).sum()


def weighted(z: Tensor, y: Tensor) -> Tensor:
    counts = y.int().bincount(z.detach()[:, 0], minlength=6)
    return counts.sin().sum() * z.sum() + torch.bincount(y, y + 1, 5).sum()


def of_chosen(z: Tensor, y: Tensor) -> Tensor:
    keep = y > 0
    counts = torch.bincount(y[keep], minlength=6) + y[keep].bincount(z.detach()[keep, 0], 6)
    return counts.sin().sum() * z.sum() + torch.bincount(y[y < 2]).sum()


def as_long_as_values_say(z: Tensor, y: Tensor) -> Tensor:
    return torch.bincount(y) * z.sum() + torch.bincount(y[:0], minlength=1)


def call() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 1, 4, 1, 0, 2, 4, 1])


COUNTED = [loads, weighted, of_chosen, as_long_as_values_say]


@pytest.mark.parametrize("count", COUNTED, ids=lambda count: count.__name__)
def test_numbers_are_counted_as_torch_counts(count: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    check(Counts(count).double(), *call(), rtol=1e-12, atol=1e-12)


def test_plans_count_the_same() -> None:
    model = Counts(loads).double()
    plan = find_plan(model, MeshSpec({"x": 2}), call(), profile="cpu", refine="off", backend="eager")
    assert verify(model, plan, call()).ok and not plan.fallbacks


def test_numbers_that_are_not_counted_are_an_error_at_the_line() -> None:
    """Where torch gives a longer result."""
    short: Any = lambda z, y: torch.bincount(y, minlength=4) * z.sum()
    with pytest.raises(
        CaptureError, match=r"minlength=4\n  at .*test_counting.*\n  try: a greater minlength"
    ):
        capture(Counts(short).double(), call(), {})
    ((_, found),) = capture(Counts(loads).double(), call(), {}).call.checks
    assert not found.answer and "not below minlength=3" in str(found.error)
