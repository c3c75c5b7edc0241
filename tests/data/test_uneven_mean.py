"""A mean over parts of 5, 7 and 4 rows, or columns, is the mean of the whole: loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from tests.ranks import RankPool

SIZES = [5, 7, 4]


class Loss(nn.Module):
    """Mean squared error over everything; a mean of the parts' means would be another number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(3, 5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(self.inner(x).relu(), y)


def example() -> tuple[Loss, Tensor, Tensor]:
    torch.manual_seed(0)
    scale = torch.arange(16.0)
    return Loss(), torch.randn(16, 3, 16) * scale, torch.randn(16, 5, 16) * scale.view(-1, 1, 1)


def on_rank(rank: int, dim: int) -> tuple[Tensor, dict[str, Tensor], tuple[int, ...]]:
    """(loss, full gradients, shape of this rank's part)."""
    model, *wholes = example()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    x, y = (
        autoshard.scatter(w if rank == 0 else None, mesh, [Shard(dim)], sizes={dim: SIZES}) for w in wholes
    )
    options = {"in_placements": [Shard(dim)], "profile": "cpu", "backend": "eager"}
    parallel = autoshard.autoshard(model, mesh, (x, y), **options)
    loss = parallel(x, y)
    loss.backward()
    grads = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
    }
    return loss.detach(), grads, tuple(x.shape)


@pytest.mark.parametrize("dim", [0, 2])
def test_the_loss_and_gradients_are_those_of_one_process(ranks: RankPool, dim: int) -> None:
    model, x, y = example()
    loss = model(x, y)
    loss.backward()
    means = [model(*parts) for parts in zip(x.split(SIZES, dim), y.split(SIZES, dim), strict=True)]
    assert abs(torch.stack(means).mean() / loss - 1) > 0.01
    for rank, (got, grads, shape) in enumerate(ranks.run(on_rank, dim, world=3)):
        assert shape[dim] == SIZES[rank]
        torch.testing.assert_close(got, loss.detach())
        torch.testing.assert_close(grads, {name: p.grad for name, p in model.named_parameters()})
