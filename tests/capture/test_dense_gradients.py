"""Embeddings and `gather` whose gradients are sparse: captured, with the dense gradient of the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from passes.capture import capture
from tests.capture.running import run_graph

TOKENS = torch.tensor([[0, 3, 3], [1, 3, 5]])


class Looks(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).square().sum()


class Picks(nn.Module):
    def __init__(self, rows: int, columns: int, sparse: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows))
        self.sparse = sparse

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.gather(self.weight, 1, tokens, sparse_grad=self.sparse)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, Picks])
def test_the_gradient_is_dense_and_of_the_same_values(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Looks(kind(6, 4, sparse=True))  # type: ignore[call-arg]
    model(TOKENS).backward()
    weight = next(model.parameters())
    assert weight.grad is not None and weight.grad.is_sparse
    captured = capture(model, (TOKENS,), {})
    found = run_graph(captured, {"table.weight": weight}, [TOKENS], [torch.ones(())])
    torch.testing.assert_close(found["grad", "table.weight"], weight.grad.to_dense())


def test_verify_compares_them() -> None:
    model = Looks(nn.Embedding(6, 4, sparse=True))
    plan = find_plan(model, MeshSpec({"dp": 2}), (TOKENS,), profile="cpu", refine="off")
    assert verify(model, plan, (TOKENS,)).ok
