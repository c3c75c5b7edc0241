"""The rank pool itself: results by rank, any world size, and failures that neither hang nor spread."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import RankFailure, RankPool


def summed(rank: int, value: float) -> tuple[int, int, float]:
    x = torch.tensor(value + rank)
    dist.all_reduce(x)
    return rank, dist.get_world_size(), x.item()


def process_id(rank: int) -> int:
    return os.getpid()


def mesh_coordinate(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(init_device_mesh("cpu", sizes).get_coordinate() or ())


def fails_on(rank: int, bad: int) -> None:
    print("about to meet rank", bad)
    if rank == bad:
        raise ValueError(f"rank {bad} is unhappy")
    dist.barrier()


def exits_on(rank: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    dist.barrier()


def sleeps_on(rank: int, bad: int) -> int:
    if rank == bad:
        time.sleep(3600)
    return rank


def skips_a_collective(rank: int) -> None:
    if rank != 0:
        dist.all_reduce(torch.ones(2))


def unpicklable(rank: int) -> object:
    return lambda: rank


def random_number(rank: int) -> float:
    return torch.rand(()).item()


@pytest.fixture
def small_pool() -> Iterator[RankPool]:
    with RankPool(timeout_seconds=30.0, grace_seconds=1.0) as pool:
        yield pool


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_results_come_by_rank_in_any_world(ranks: RankPool, world: int) -> None:
    total = sum(10.0 + r for r in range(world))
    assert ranks.run(summed, 10.0, world=world) == [(rank, world, total) for rank in range(world)]


def test_processes_are_kept_between_runs(ranks: RankPool) -> None:
    assert ranks.run(process_id, world=2) == ranks.run(process_id, world=3)[:2]


def test_every_run_has_the_same_seed(ranks: RankPool) -> None:
    assert ranks.run(random_number, world=2) == ranks.run(random_number, world=2)


def test_meshes_of_any_shape_follow_each_other(ranks: RankPool) -> None:
    assert ranks.run(mesh_coordinate, (2, 2), world=4)[3] == (1, 1)
    assert ranks.run(mesh_coordinate, (2, 2, 2), world=8)[5] == (1, 0, 1)


def test_a_failing_rank_shows_its_traceback_and_the_next_run_works(small_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1 is unhappy") as caught:
        small_pool.run(fails_on, 1, world=3)
    first_rank, text = next(iter(caught.value.errors.items()))
    assert first_rank == 1
    assert "in fails_on" in text and "about to meet rank 1" in text
    assert small_pool.run(summed, 0.0, world=2)[0] == (0, 2, 1.0)


def test_a_dying_rank_is_named(small_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="exit code 7"):
        small_pool.run(exits_on, 0, world=2)


def test_a_hanging_rank_is_killed_and_shows_where_it_hung(small_pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="in sleeps_on") as caught:
        small_pool.run(sleeps_on, 1, world=2, timeout_seconds=2.0)
    assert 1 in caught.value.errors
    assert time.monotonic() - started < 15
    assert small_pool.run(sleeps_on, -1, world=2) == [0, 1]


def test_a_mismatched_collective_does_not_poison_the_next_run(small_pool: RankPool) -> None:
    with pytest.raises(RankFailure):
        small_pool.run(skips_a_collective, world=2, timeout_seconds=3.0)
    assert small_pool.run(summed, 0.0, world=2)[1] == (1, 2, 1.0)


def test_what_cannot_be_pickled_is_an_error_not_a_hang(small_pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="pickle"):
        small_pool.run(unpicklable, world=1)


def test_a_world_the_pool_cannot_hold_is_refused(small_pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world is 17; the pool has 1 to 16 ranks"):
        small_pool.run(process_id, world=17)
