"""What a script writes into parts of a parameter, and ops that torch has not of shards, or wrong: on two ranks, as on
one tensor.

Rows are split 6 and 5, columns 3 and 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autoshard.runtime.parameters import complete_dtensor_ops
from cost_model.errors import ShardingError
from tests.ranks import RankPool

WHOLE = torch.linspace(-2, 3, 55).view(11, 5)


def _set_row(p: Any) -> None:
    p[2] = 0.5


def _set_column(p: Any) -> None:
    p[:, 2] = 0.5


def _set_masked(p: Any) -> None:
    p[p > 0.1] = 0.5


def _set_rows_masked(p: Any) -> None:
    p[p[:, 0] > 0.1] = 0.5
    p[:, torch.tensor([True, False, True, True, False])] += 1.0


def _set_at(p: Any) -> None:
    p[torch.tensor([1, 8, 3]), torch.tensor([4, 0, 2])] = torch.tensor([7.0, 8.0, 9.0])
    p[[1, 9]] = 0.5
    p[:, [0, 3]] *= 2
    p.index_put_((torch.tensor([2, 2]),), torch.ones(5), accumulate=True)
    p.scatter_(1, torch.tensor([[1, 3]] * 11), 4.0)
    p.scatter_add_(0, torch.tensor([[10, 0, 1, 1, 2]]), torch.ones(1, 5))
    p.index_add_(1, torch.tensor([4, 1]), torch.ones(11, 2))
    p.index_fill_(0, torch.tensor([5]), -1.0)


def _rows(p: Any) -> None:
    for row in p:
        row.div_(row.norm() + 1)


def _views_of_views(p: Any) -> None:
    p[2:7].t()[1].add_(5.0)
    first, last = p.split([4, 7])
    last.zero_()
    first[0, 0] = 9.0
    p.view(5, 11).unsqueeze(0)[0, 1].copy_(torch.arange(11.0))


def _held(p: Any) -> None:
    """A view that lasts sees what its tensor becomes."""
    row = p[1]
    p.mul_(3)
    row.add_(1)
    p.mul_(2)
    p[0] = row.sum()


def _lists(p: Any) -> None:
    """As optimizers with `foreach=True` do."""
    norms, sums = [p.norm(dim=0), p.norm(dim=1)], [p.sum(0), p.mean(0), p.sum(1)]
    torch._foreach_mul_(norms, norms)
    torch._foreach_add_(norms, -9.0)
    torch._foreach_exp_(sums)
    p.mul_(norms[0]).add_(norms[1][:, None])
    p.add_(sums[0]).add_(sums[1]).add_(sums[2][:, None])


def _views_of_pending(p: Any) -> None:
    sums, means, largest, norms = p.sum(0), p.mean(0), p.amax(0), p.norm(dim=0)
    for x in (sums, means, largest, norms):
        x[:2].sub_(10.0)
        x.detach()[1:].square_()
    sums[1].copy_(torch.tensor(5.0))
    means[1:3] = largest[:2]
    p.copy_(torch.cat([p[:7], *(x[None] for x in (sums, means, largest, norms))]))


def _smallest_to_zero(p: Any) -> None:
    p.mul_(p.abs() > p.abs().flatten().kthvalue(20).values)


WRITES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda p: p[1].mul_(2),
    "rows": lambda p: p.data[1:4].mul_(2),
    "columns": lambda p: p[:, :2].mul_(2),
    "narrow": lambda p: p.narrow(0, 3, 4).fill_(2.0),
    "flat": lambda p: p.view(-1)[3:9].mul_(2),
    "chunk": lambda p: p.chunk(2)[0].mul_(2),
    "diagonal": lambda p: p.diagonal().add_(1.0),
    "turned": lambda p: p.t()[1].zero_(),
    "set a row": _set_row,
    "set a column": _set_column,
    "set what a mask chooses": _set_masked,
    "set rows that a mask chooses": _set_rows_masked,
    "set by numbers": _set_at,
    "each row": _rows,
    "views of views": _views_of_views,
    "a view that lasts": _held,
    "the smallest to zero": _smallest_to_zero,
    "index_copy_": lambda p: p.index_copy_(0, torch.tensor([1, 8]), torch.ones(2, 5)),
    "tril_": lambda p: p.tril_(),
    "renorm_": lambda p: p.renorm_(2, 0, 0.5),
    "lists of sums and norms": _lists,
    "views of pending sums and norms": _views_of_pending,
    "a pending sum": lambda p: p[0].copy_(p.sum(0).fill_(2.0)),
    "fill_diagonal_": lambda p: p.fill_diagonal_(7.0),
    "eye_": nn.init.eye_,
}


def _written(rank: int) -> dict[tuple[str, int], Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    complete_dtensor_ops(torch.device("cpu"), [mesh])
    found: dict[tuple[str, int], Tensor] = {}
    for name, write in WRITES.items():
        for dim in (0, 1):
            parameter: Any = nn.Parameter(distribute_tensor(WHOLE.clone(), mesh, [Shard(dim)]))
            with torch.no_grad():
                write(parameter)
            assert parameter.placements == (Shard(dim),)
            found[name, dim] = parameter.detach().full_tensor()
    return found


def test_what_is_written_into_a_part_is_in_the_parameter(ranks: RankPool) -> None:
    for found in ranks.run(_written, world=2):
        for (name, dim), ours in found.items():
            WRITES[name](wanted := WHOLE.clone())
            torch.testing.assert_close(ours, wanted, msg=lambda text, of=(name, dim): f"{of}: {text}")


OTHER = WHOLE * 2 + torch.arange(5.0)
READS: dict[str, Callable[[Any], Any]] = {
    "parts": lambda p: (
        p[1].square().sum() + p.view(-1)[3:20].abs().sum() + p.chunk(2)[1].norm() + p.unbind(1)[2].sum()
    ),
    "what a mask chooses": lambda p: (
        p[p > 0.1].sum() + p[p[:, 1] > 0].mean() + p.masked_select(p > 1).square().sum()
    ),
    "gather of fewer rows": lambda p: p.gather(1, torch.tensor([[1], [2]])),
    "rows of an embedding, twice": lambda p: (e := F.embedding(torch.tensor([1, 8, 8]), p)).cos() * e,
    "the k-th smallest": lambda p: p.abs().flatten().kthvalue(20).values,
    "mse_loss": lambda p: F.mse_loss(p, OTHER),
    "smooth_l1_loss": lambda p: F.smooth_l1_loss(p, OTHER),
    "huber_loss": lambda p: F.huber_loss(p, OTHER, delta=0.3),
    "soft_margin_loss": lambda p: F.soft_margin_loss(p, OTHER.sign()),
    "binary_cross_entropy": lambda p: F.binary_cross_entropy(p.sigmoid(), OTHER.sigmoid()),
    "binary_cross_entropy_with_logits": lambda p: F.binary_cross_entropy_with_logits(p, OTHER.sigmoid()),
    "cosine_embedding_loss": lambda p: F.cosine_embedding_loss(p, OTHER, OTHER[:, 0].sign()),
    "norms of columns": lambda p: p.norm(dim=0).sum(),
    "norms of rows": lambda p: p.norm(dim=1).sum(),
    "norms in a row": lambda p: torch.stack([p.norm(), (p * p).norm()]).sum(),
    "the largest": lambda p: p.norm(p=float("inf")) - p.amin(),
    "sums and the largest": lambda p: torch.cat([p.sum(0), p.amax(0)]).square().sum(),
    "a complex number": lambda p: torch.polar(p.abs() + 1, p).real.sum() + (p * 1j).abs().sum(),
    "quantiles": lambda p: p.quantile(0.3) + p.quantile(torch.tensor([0.1, 0.9]), dim=1, keepdim=True).sum(),
    "turned in place": lambda p: ((p * 1).t_().unsqueeze_(0).mul_(2) * OTHER.t()).sum(),
    "gather of the largest": lambda p: p.gather(1, p.argmax(1, keepdim=True)).sum() + p.argmax(),
    "a sum and a number": lambda p: (p.sum() + torch.tensor(7)) * (p.sum() + 5),
    "convolution": lambda p: F.conv1d(torch.ones(2, 5, 7), p[:, :, None]),
    "transposed convolution": lambda p: F.conv_transpose1d(torch.ones(2, 11, 7), p[:, :, None], stride=2),
    "group_norm": lambda p: F.group_norm(p[None].transpose(1, 2), 1)[0, 2, 3:].sum(),
    "a dim from the end": lambda p: p.select(-1, 2).square() * p[:, 1].argmax(-1) + p.argmax(-1),
    "the largest of few rows": lambda p: p[:2, :1].repeat(1, 2)[:, :2].argmax(0) + p[:1].argmin() * p.sum(),
    "are they equal": lambda p: (
        p.sum() * torch.equal(p[:, :1], p[:, 0])
        + p.amax() * torch.equal(p, p * 1) * (not torch.equal(p, OTHER))
    ),
    "16 bits": lambda p: (p * p.short()).sum(0) + (p * 7).to(torch.int16)[3],
    "copies of views": lambda p: torch.view_copy(p, (5, -1)) * torch.arange(5.0)[:, None],
    "conjugates": lambda p: torch.view_as_real(torch.fft.ihfft(p, n=4, dim=0).resolve_conj()),
    "strides": lambda p: (
        p.as_strided((3, 2), (5, 1), 7)
        * p.t().as_strided((3, 2), (2, 3))
        * (p * 2).as_strided((3, 2), (1, 3), 4)
    ),
    "sparse": lambda p: (
        torch.sparse.mm(p.to_sparse(), torch.ones(5, 2)) + torch.sparse.sum((p * p).to_sparse())
    ),
    "strides of a part": lambda p: p[2:7, 1:4].clone().as_strided((3, 2), (2, 1), 3),
}


def _read(p: Any, read: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Its value without a graph, and the gradient."""
    with torch.no_grad():
        value = read(p)
    result = read(p.requires_grad_())
    result.square().sum().backward()
    return value, p.grad


def _all_read(rank: int) -> dict[tuple[str, int], tuple[Any, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    complete_dtensor_ops(torch.device("cpu"), [mesh])
    found: dict[tuple[str, int], tuple[Any, ...]] = {}
    for name, read in READS.items():
        for dim in (0, 1):
            values = _read(distribute_tensor(WHOLE.clone(), mesh, [Shard(dim)]), read)
            found[name, dim] = tuple(v.full_tensor() if isinstance(v, DTensor) else v for v in values)
    return found


def test_what_is_read_and_its_gradient_are_of_the_whole(ranks: RankPool) -> None:
    for found in ranks.run(_all_read, world=2):
        for (name, dim), ours in found.items():
            wanted = _read(WHOLE.clone(), READS[name])
            torch.testing.assert_close(ours, wanted, msg=lambda text, of=(name, dim): f"{of}: {text}")


def _resized(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    complete_dtensor_ops(torch.device("cpu"), [mesh])
    p: Any = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)])
    assert p.resize_(WHOLE.shape).full_tensor().equal(WHOLE)
    with pytest.raises(ShardingError) as error:
        p.resize_(3)
    return str(error.value)


def test_memory_in_parts_has_one_size(ranks: RankPool) -> None:
    for said in ranks.run(_resized, world=2):
        assert "resize_" in said and "  try: p.data = " in said


def _strided_part(rank: int, cut: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    complete_dtensor_ops(torch.device("cpu"), [mesh])
    p: Any = distribute_tensor(WHOLE.clone(), mesh, [Shard(cut)])
    with pytest.raises(ShardingError) as error:
        (p[:, 1:3] if cut == 0 else p[2:]).as_strided((3, 2), (5, 1))
    return str(error.value)


@pytest.mark.parametrize("cut", [0, 1])
def test_strides_of_a_part_of_shards_are_refused(ranks: RankPool, cut: int) -> None:
    for said in ranks.run(_strided_part, cut, world=2):
        assert "where in memory it begins is not known\n  try: as_strided of the parameter" in said


DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda p: p.normal_(),
    "orthogonal_": nn.init.orthogonal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "a generator": lambda p: p.uniform_(generator=torch.Generator().manual_seed(7)),
    "a row": lambda p: p[1].normal_(),
    "rand_like": lambda p: p.add_(torch.rand_like(p)),
    "dropout": lambda p: p.copy_(F.dropout(p, 0.5)),
    "rrelu": lambda p: p.copy_(F.rrelu(p - 1, training=True)),
    "poisson": lambda p: p.copy_(torch.poisson(p.abs())),
    "after all": lambda p: p.normal_(),
}


def _draw(p: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, draw in DRAWS.items():
            draw(p)
            found[name] = p.full_tensor().clone() if isinstance(p, DTensor) else p.clone()
    return found


def _drawn(rank: int, placements: Any) -> dict[str, Tensor]:
    """Ranks begin with other states of their generators."""
    mesh = init_device_mesh("cpu", (3,))
    complete_dtensor_ops(torch.device("cpu"), [mesh])
    torch.manual_seed(rank)
    return _draw(distribute_tensor(WHOLE.clone(), mesh, placements))


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
def test_random_numbers_are_those_of_one_process(ranks: RankPool, placements: Any) -> None:
    torch.manual_seed(0)
    wanted = _draw(WHOLE.clone())
    for found in ranks.run(_drawn, placements, world=3):
        for name, ours in found.items():
            torch.testing.assert_close(ours, wanted[name], msg=lambda text, of=name: f"{of}: {text}")


def _without_versions(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    complete_dtensor_ops(torch.device("cpu"), [mesh])
    with torch.inference_mode():
        part = (distribute_tensor(WHOLE, mesh, [Shard(0)]) * 2)[3]
        return (part * 2).full_tensor()  # type: ignore[attr-defined]


def test_parts_in_inference_mode(ranks: RankPool) -> None:
    for found in ranks.run(_without_versions, world=2):
        torch.testing.assert_close(found, WHOLE[3] * 4)
