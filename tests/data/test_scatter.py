"""`scatter`, `gather` and `weighted_mean` among real ranks, against slices of the whole tensor."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import autoshard
from tests.ranks import RankPool

LINE = (3,)
SQUARE = (2, 2)
R = Replicate()


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def message(fn: Callable[[], object]) -> str:
    """What `fn` raised, as "Class: first line", or "no error"."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def value(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).view(shape)


def chunked(rank: int, mesh_shape: tuple[int, ...], seeds: range) -> int:
    """Random tensors and placements, default sizes: what DTensor holds. Returns the number of cases."""
    mesh = mesh_of(mesh_shape)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64]
    for seed in seeds:
        rng = random.Random(seed)
        shape = [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(rng.randint(1, 3))]
        placements = [
            rng.choice([R, *(Shard(d) for d in range(-len(shape), len(shape)))]) for _ in mesh_shape
        ]
        whole = value(*shape).to(rng.choice(dtypes))
        if rng.random() < 0.5:
            whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
        source = rng.randrange(mesh.size())
        got = autoshard.scatter(whole if rank == source else None, mesh, placements, source=source)
        wanted = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        assert type(got) is Tensor and got.is_contiguous() and got.dtype == whole.dtype
        assert torch.equal(got, wanted), (seed, shape, placements)
        target = rng.choice([None, source])
        back = autoshard.gather(got, mesh, placements, target=target)
        if target in (None, rank):
            assert back is not None and torch.equal(back, whole), (seed, shape, placements)
        else:
            assert back is None
    return len(seeds)


def test_parts_are_those_of_dtensor_and_come_back(ranks: RankPool) -> None:
    assert ranks.run(chunked, LINE, range(12), world=3) == [12] * 3
    assert ranks.run(chunked, SQUARE, range(12, 30), world=4) == [18] * 4
    assert ranks.run(chunked, (1, 2, 2), range(30, 36), world=4) == [6] * 4


def sized(
    rank: int, mesh_shape: tuple[int, ...], placements: Sequence[Placement], sizes: dict[int, list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    mesh = mesh_of(mesh_shape)
    whole = value(4, 16).requires_grad_()
    part = autoshard.scatter(whole if rank == 0 else None, mesh, placements, sizes=sizes)
    assert not part.requires_grad
    alone = autoshard.gather(part, mesh, placements, target=1, device="cpu")
    return part, autoshard.gather(part, mesh, placements), value() if alone is None else alone


def check_sized(
    ranks: RankPool,
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    sizes: dict[int, list[int]],
    wanted: list[Tensor],
) -> None:
    replies = ranks.run(sized, mesh_shape, placements, sizes, world=len(wanted))
    for rank, (part, everywhere, alone) in enumerate(replies):
        assert torch.equal(part, wanted[rank])
        assert torch.equal(everywhere, value(4, 16))
        assert (alone.ndim > 0) == (rank == 1)
    assert torch.equal(replies[1][2], value(4, 16))


def test_explicit_sizes(ranks: RankPool) -> None:
    x = value(4, 16)
    check_sized(ranks, LINE, [Shard(1)], {1: [5, 7, 4]}, [x[:, :5], x[:, 5:12], x[:, 12:]])
    check_sized(ranks, LINE, [Shard(-1)], {-1: [0, 16, 0]}, [x[:, :0], x, x[:, :0]])
    columns = {1: [3, 13]}
    check_sized(ranks, SQUARE, [Shard(0), Shard(1)], columns, [x[:2, :3], x[:2, 3:], x[2:, :3], x[2:, 3:]])
    # Two axes on one dim: sizes are those of ranks 0, 1, 2, 3.
    both = [x[:, :1], x[:, 1:10], x[:, 10:10], x[:, 10:]]
    check_sized(ranks, SQUARE, [Shard(1), Shard(1)], {1: [1, 9, 0, 6]}, both)
    check_sized(ranks, SQUARE, [R, Shard(1)], columns, [x[:, :3], x[:, 3:], x[:, :3], x[:, 3:]])


def refused(rank: int) -> list[str]:
    """Every call is wrong, on all ranks or on one; what each rank hears."""
    mesh = mesh_of(LINE)
    x = value(16, 2) if rank == 0 else None
    differs = Shard(0) if rank != 2 else R
    shard = [Shard(0)]
    calls: list[Callable[[], Any]] = [
        lambda: autoshard.scatter(value(16, 2), mesh, shard),
        lambda: autoshard.scatter(None, mesh, shard),
        lambda: autoshard.scatter(x, mesh, shard, source=3),
        lambda: autoshard.scatter(x, mesh, [Shard(2)]),
        lambda: autoshard.scatter(x, mesh, [Partial()]),
        lambda: autoshard.scatter(x, mesh, [Shard(0), R]),
        lambda: autoshard.scatter(x, mesh, shard, sizes={0: [5, 7, 5]}),
        lambda: autoshard.scatter(x, mesh, shard, sizes={0: [5, 12, -1]}),
        lambda: autoshard.scatter(x, mesh, shard, sizes={1: [1, 1]}),
        lambda: autoshard.scatter(x, mesh, shard, sizes={4: [1, 1]}),
        lambda: autoshard.scatter(x, mesh, shard, sizes=[5, 7, 4]),  # type: ignore[arg-type]
        lambda: autoshard.scatter(x, mesh, [differs]),
        lambda: autoshard.scatter(x, mesh, "x" if rank == 1 else shard),  # type: ignore[arg-type]
        lambda: autoshard.gather(value(2, 2), mesh, [Partial()]),
        lambda: autoshard.gather(value(2, 2 + rank), mesh, shard),
        lambda: autoshard.gather(value(2, 2), mesh, shard, target=-1),
        lambda: autoshard.gather(DTensor.from_local(value(2), mesh, shard), mesh, shard),
        lambda: autoshard.gather(value(2, 2).to(torch.int32 if rank == 1 else torch.int64), mesh, shard),
        lambda: autoshard.data_loader(range(rank + 8), mesh, Shard(0), batch_size=4, drop_last=True),  # type: ignore[arg-type]
        lambda: autoshard.data_loader(range(8), mesh, Shard(0), batch_size=4 - rank, sizes={0: [1, 1, 2]}),  # type: ignore[arg-type]
    ]
    began = time.monotonic()
    heard = [message(call) for call in calls]
    assert time.monotonic() - began < 20
    # And they still talk afterwards.
    assert autoshard.scatter(x, mesh, shard).shape[0] in (6, 4)
    return heard


EXPECTED = [
    "ShardingError: rank 1 passes a tensor; only that of rank 0, the source, is scattered",
    "ShardingError: tensor on rank 0, the source, is a NoneType",
    "ShardingError: source is rank 3; mesh (a=3) has ranks 0 to 2",
    "ShardingError: cannot split dim 2 of the tensor to scatter over axis 'a': it has 2 dims (16, 2)",
    "ShardingError: the tensor to scatter is Partial over axis 'a'; data is split or replicated",
    "ShardingError: placements has 2 placements; the mesh has 1 axes ('a',)",
    "ShardingError: sizes[0] = [5, 7, 5] adds up to 17; dim 0 of the tensor to scatter is 16 long",
    "ShardingError: sizes[0][2] is -1",
    "ShardingError: sizes[1] has 2 parts [1, 1]; dim 1 of the tensor to scatter is split over no axis, into 1",
    "ShardingError: sizes has dim 4; the tensor to scatter has 2 dims (16, 2)",
    "ShardingError: sizes is [5, 7, 4]",
    "PlanError: the ranks are about to run different programs",
    "ShardingError: placements is 'x', which is no placement",
    "ShardingError: the tensor to gather is Partial over axis 'a'; data is split or replicated",
    "ShardingError: the ranks' shards of the tensor to gather do not fit together: rank 1 has [2, 3], "
    "which disagrees with other ranks in dim 1",
    "ShardingError: target is rank -1; mesh (a=3) has ranks 0 to 2",
    "ShardingError: local is a DTensor, which knows its parts",
    "PlanError: the ranks are about to run different programs",
    "PlanError: the ranks are about to run different programs",
    "ShardingError: sizes[0] = [1, 1, 2] adds up to 4; dim 0 of a batch is 3 long",
]


def test_what_is_wrong_on_one_rank_raises_on_all_and_nothing_hangs(ranks: RankPool) -> None:
    zero, one, two = ranks.run(refused, world=3, timeout_seconds=60)
    assert zero == EXPECTED
    # Ranks where several things are wrong may name another of them first.
    assert [text for text in one[1:] if text] == EXPECTED[1:]
    assert two[1:-1] == EXPECTED[1:-1] and two[0].startswith("ShardingError: rank 2 passes")


def loaded(rank: int) -> list[list[Tensor]]:
    """Every batch of a loader, put together again from the ranks' parts."""
    mesh = mesh_of(SQUARE)
    placements = ([Shard(0), Shard(2)], [Shard(0), R])
    data = autoshard.ArrayDataset(value(17, 2, 9), torch.arange(17))
    loader = autoshard.data_loader(
        data, mesh, placements, batch_size=5, sizes={2: [2, 7]}, shuffle=True, drop_last=True
    )
    batches = [(x, y) for x, y in loader]
    assert [tuple(x.shape) for x, _ in batches] == [(3 if rank < 2 else 2, 2, 7 if rank % 2 else 2)] * 3
    return [
        [autoshard.gather(part, mesh, placed) for part, placed in zip(batch, placements, strict=True)]
        for batch in batches
    ]


def test_a_loader_on_real_ranks(ranks: RankPool) -> None:
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    for batches in ranks.run(loaded, world=4):
        for (x, y), samples in zip(batches, order[:15].split(5), strict=True):
            assert torch.equal(y, samples) and torch.equal(x, value(17, 2, 9)[samples])


def metric(rank: int) -> list[float]:
    mesh = mesh_of(LINE)
    rows = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0, 6.0]).split([3, 2, 1])[rank]
    nothing = float("nan") if rank == 2 else 4.0
    return [
        autoshard.weighted_mean(rows.mean(), len(rows), mesh).item(),
        *autoshard.weighted_mean(torch.stack([rows.mean(), rows.sum()]), len(rows), mesh).tolist(),
        autoshard.weighted_mean(nothing, 0 if rank == 2 else 5, mesh).item(),
        autoshard.weighted_mean(1.0, 0, mesh).item(),
    ]


def test_a_mean_of_uneven_parts(ranks: RankPool) -> None:
    # Rows 1 2 3 | 10 20 | 6: their mean is 42 / 6; sums 6, 30, 6 weigh 3, 2, 1: 84 / 6.
    for got in ranks.run(metric, world=3):
        assert got[:4] == [7.0, 7.0, 14.0, 4.0] and got[4] != got[4]
