"""A mean over parts of 5, 7 and 4 rows, or columns, is the mean of the whole: loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoshard
from autoshard.global_call import global_call
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
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


class Weighted(Loss):
    """weights: [16], of no row."""

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        assert weights is not None
        return ((self.inner(x).relu() - y) * weights).square().mean()


ROWS = [(5, 7, 4), (5, 7, 4), (5, 6, 4), (5, 7, 0), (2, 7, 4)]


def parts_on_rank(rank: int) -> list[Tensor]:
    """Losses of batches of which this rank passes `ROWS[...][rank]` rows."""
    _, x, y = example()
    weights = torch.arange(16.0)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = autoshard.autoshard(
        Weighted(), mesh, profile="cpu", backend="eager", refine="off", batch="per_rank"
    )
    losses: list[Tensor] = []
    for rows in ROWS:
        mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        losses.append(model(x[mine], y[mine], weights).detach())
    return losses


def test_ranks_pass_their_own_rows_of_any_number(ranks: RankPool) -> None:
    """The number changes on one rank alone, which the others cannot know by themselves."""
    _, x, y = example()
    torch.manual_seed(0)
    model = Weighted()
    wanted = [model(x[: sum(rows)], y[: sum(rows)], torch.arange(16.0)) for rows in ROWS]
    for losses in ranks.run(parts_on_rank, world=3):
        torch.testing.assert_close(losses, [loss.detach() for loss in wanted])


def test_rows_of_the_batch_are_those_of_all_ranks() -> None:
    """A mask that has as many rows as the batch on one rank alone is no part of it; a scalar is none, nor one with
    placements of its own."""
    mesh = MeshSpec({"dp": 2, "tp": 2}, "cpu")
    mine = [(), (3, 8), (3,), (3, 3), (3, 2)]
    others = [(), (2, 8), (2,), (3, 3), (3, 2)]
    tensors = tuple(torch.zeros(shape) for shape in mine)
    placed = {"args[4]": [Shard(1), Replicate()]}
    found = global_call(tensors, {}, mesh, placed, lambda _: [mine, others, mine, others], ("dp", "tp"))
    assert found.shapes == ((), (10, 8), (10,), (3, 3), (3, 4))
    assert found.layouts[1].dims[0] == ("dp", "tp") and 3 not in found.layouts


def test_a_plan_for_parts_of_the_batch() -> None:
    model, x, y = example()
    mesh = MeshSpec({"dp": 2}, "cpu")
    plan = autoshard.find_plan(model, mesh, (x[:4], y[:4]), backend="eager", batch="per_rank")
    assert [layout.dims[0] for _, layout in sorted(plan.inputs.items())] == [("dp",), ("dp",)]
    with pytest.raises(ShardingError, match="batch is 'rank'"):
        autoshard.find_plan(model, mesh, (x, y), batch="rank")
