"""Collectives through memory that ranks share, each rank a thread here; and how real ranks come to share some."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cost_model.measure import host_memory
from cost_model.measure.host_memory import HostMemory, chunk_nbytes, host_memory_of, memory_nbytes
from tests.ranks import RankFailure, RankPool


def joined(ranks: int) -> list[HostMemory]:
    """The ends of ranks that share memory."""
    memory = torch.empty(memory_nbytes(ranks), dtype=torch.uint8)
    peers: list[list[socket.socket]] = [[] for _ in range(ranks)]
    for one, other in combinations(range(ranks), 2):
        ends = socket.socketpair()
        peers[one].append(ends[0])
        peers[other].append(ends[1])
    return [HostMemory(rank, ranks, memory, peers[rank]) for rank in range(ranks)]


CHUNK = chunk_nbytes(3) // 8
"""Of three ranks: float64."""


@pytest.mark.parametrize("numel", [1, 2, 4095, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_all_kinds_of_all_sizes(numel: int) -> None:
    """Small ones are summed whole, and much goes in chunks. Twice each: what one call leaves the next one must not
    read."""
    ends = joined(3)
    held = [torch.randn(3 * numel, dtype=torch.float64) for _ in ends]
    total = held[0] + held[1] + held[2]

    def run(end: HostMemory) -> list[Tensor]:
        mine = held[end.rank]
        return [
            *(end.all_reduce(mine[:numel], "sum", torch.empty_like(mine[:numel])) for _ in range(2)),
            *(end.all_gather(mine[:numel]) for _ in range(2)),
            *(end.reduce_scatter(mine, "sum") for _ in range(2)),
            end.all_reduce(mine[:numel], "max", torch.empty_like(mine[:numel])),
        ]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(run, ends))
    gathered = torch.cat([mine[:numel] for mine in held])
    largest = torch.stack(held)[:, :numel].amax(0)
    for rank, results in enumerate(found):
        mine = total[numel * rank : numel * (rank + 1)]
        for result, right in zip(
            results, [total[:numel]] * 2 + [gathered] * 2 + [mine] * 2 + [largest], strict=True
        ):
            assert torch.equal(result, right)


def test_memory_is_little_for_many_ranks() -> None:
    """16 MiB, and a page each where that is more: containers have 64 MiB."""
    assert chunk_nbytes(2) == chunk_nbytes(7) == 2**20 and memory_nbytes(7) == 2**24
    assert chunk_nbytes(64) == 2**24 // 130 // 4096 * 4096
    assert all(memory_nbytes(ranks) <= 2**24 for ranks in range(2, 2000))
    assert chunk_nbytes(10_000) == 4096 and math.gcd(chunk_nbytes(9), 4096) == 4096


def test_a_wait_for_a_rank_that_ends_is_an_error() -> None:
    one, other = joined(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(one.all_gather, torch.ones(3))
        time.sleep(0.05)
        other.cut()
        with pytest.raises(RuntimeError, match="Connection closed: a rank of this host has ended"):
            waiting.result(timeout=10.0)
    with pytest.raises(RuntimeError, match="Connection closed"):
        one.all_gather(torch.ones(3))


def test_who_does_not_come_in_time_is_an_error() -> None:
    one, _ = joined(2)
    for peer in one.peers:
        peer.settimeout(0.05)
    with pytest.raises(RuntimeError, match="Connection timed out: a rank of this host did not come"):
        one.all_gather(torch.ones(3))


def in_two_modes(rank: int) -> tuple[list[float], list[float], list[float]]:
    """Sums in inference mode and then outside; and the timeouts of its sockets."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    with torch.inference_mode():
        shared = host_memory_of(group)  # type: ignore[arg-type]
        assert shared is not None
        inside = shared.all_reduce(torch.ones(2), "sum", torch.empty(2)).tolist()
    outside = shared.all_reduce(torch.ones(2), "sum", torch.empty(2)).tolist()
    return inside, outside, [peer.gettimeout() for peer in shared.peers]  # type: ignore[misc]


def test_set_up_in_inference_mode_and_with_the_groups_timeout(ranks: RankPool) -> None:
    assert ranks.run(in_two_modes, world=2) == [([2.0, 2.0], [2.0, 2.0], [77.0])] * 2


def shares(rank: int, hosts: int, broken: str, in_memory: Path) -> tuple[bool, float]:
    """Whether it does, and a sum. broken: what fails on the last rank. in_memory: where folders of groups go."""
    last = rank == dist.get_world_size() - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank % hosts))
        patch.setattr(host_memory, "_IN_MEMORY", in_memory)
        if broken == "folder":
            patch.setattr(host_memory, "_IN_MEMORY", Path("/no/such/folder"))
        elif broken == "_network":
            patch.setattr(host_memory, broken, lambda: f"net:[{rank}]")
        elif broken and last:
            patch.setattr(host_memory, broken, refused)
        group = dist.new_group(list(range(dist.get_world_size())))
        shared = host_memory_of(group)  # type: ignore[arg-type]
    total = torch.full((2,), float(rank))
    dist.all_reduce(total, group=group)
    return shared is not None, total[1].item()


def refused(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("hosts", "broken", "shared"),
    [
        (1, "", True),
        (2, "", False),
        (1, "folder", False),
        (1, "_listening", False),
        (1, "_mapped", False),
        (1, "_connected", False),
        (1, "_network", False),
    ],
)
def test_who_shares_memory(ranks: RankPool, hosts: int, broken: str, shared: bool) -> None:
    """Where one cannot, none does, and gloo goes on. No folder is left."""
    with TemporaryDirectory(prefix="test-", dir="/dev/shm") as in_memory:
        assert ranks.run(shares, hosts, broken, Path(in_memory), world=3) == [(shared, 3.0)] * 3
        assert os.listdir(in_memory) == []


def killed_with_a_folder(in_memory: Path) -> None:
    host_memory._IN_MEMORY = in_memory
    host_memory._new_folder(3, ExitStack())
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_rank_left_is_removed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_memory, "_IN_MEMORY", tmp_path)
    (tmp_path / "autoshard-of-somebody").mkdir()
    with ExitStack() as first, ExitStack() as second:
        living = host_memory._new_folder(3, first)
        process = multiprocessing.get_context("spawn").Process(target=killed_with_a_folder, args=(tmp_path,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL and len(os.listdir(tmp_path)) == 3
        mine = host_memory._new_folder(3, second)
        assert {str(path) for path in tmp_path.iterdir()} == {
            living,
            mine,
            str(tmp_path / "autoshard-of-somebody"),
        }
    assert os.listdir(tmp_path) == ["autoshard-of-somebody"]


def test_a_process_that_ends_wakes_the_others(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(ends_early, world=3)
    assert "Connection closed" in failure.value.errors[0]


def ends_early(rank: int) -> None:
    shared = host_memory_of(dist.group.WORLD)  # type: ignore[arg-type]
    assert shared is not None
    if rank == 1:
        os._exit(3)
    shared.all_gather(torch.ones(3))
