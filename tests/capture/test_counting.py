"""torch.histc as primitives: torch's own counts, and a graph."""

from __future__ import annotations

import pytest
import torch

from passes.capture import capture
from passes.capture.counting import histc


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
