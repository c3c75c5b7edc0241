"""Collectives in flight on gloo: whole, and started by the ops that run there instead of torch's functional ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from cost_model.measure.host_memory import host_memory_of
from passes.ops.collective_ops import NAMED_BY_NAME
from tests.ranks import RankPool

FLYING = 8
COLUMNS = 2**17
"""Of gathered rows: too many for one round."""


def gathered(rank: int) -> tuple[bool, set[str]]:
    """Whether FLYING gathers of rank + number arrived whole, and the c10d ops that ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank))  # a host for each rank: those of one host share memory
        group = dist.new_group(list(range(dist.get_world_size())))
        assert host_memory_of(group) is None  # type: ignore[arg-type]
    gather = NAMED_BY_NAME["all_gather_into_tensor"]
    world, name = dist.get_world_size(), group.group_name
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        flying = [gather(torch.full((2, COLUMNS), float(rank + n)), world, name, "w") for n in range(FLYING)]
        found = [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in flying]
    ranks = torch.arange(world).repeat_interleave(2).unsqueeze(1).expand(-1, COLUMNS)
    whole = all(torch.equal(tensor, ranks + float(n)) for n, tensor in enumerate(found))
    return whole, {event.key for event in recorded.key_averages() if event.key.startswith("c10d::")}


def test_gathers_in_flight(ranks: RankPool) -> None:
    """Not by allgather_into_tensor_coalesced_, several of which crash gloo now and then (decision 0010)."""
    assert ranks.run(gathered, world=3) == [(True, {"c10d::_allgather_base_"})] * 3


def exchanged(rank: int) -> list[bool]:
    """Whether messages of several exchanges in flight arrived where they belong: r tells q `SIZES[n][r][q]` numbers."""
    group = dist.group.WORLD
    assert group is not None
    exchange, name = NAMED_BY_NAME["all_to_all_single"], group.group_name
    flying = []
    for n, sizes in enumerate(SIZES):
        sent = torch.cat(
            [torch.full((count,), 100.0 * n + 10 * rank + q) for q, count in enumerate(sizes[rank])]
        )
        flying.append(exchange(sent, [row[rank] for row in sizes], sizes[rank], name, "x"))
    found = [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in flying]
    wanted = [
        torch.cat([torch.full((row[rank],), 100.0 * n + 10 * r + rank) for r, row in enumerate(sizes)])
        for n, sizes in enumerate(SIZES)
    ]
    return [torch.equal(one, two) for one, two in zip(found, wanted, strict=True)]


SIZES = (
    [[0, 2, 0], [1, 0, 3], [0, 2, 0]],  # neighbours
    [[4, 0, 1], [0, 0, 0], [7, 0, 2]],  # one has nothing to do with it
    [[0, 0, 0], [0, 5, 0], [0, 0, 0]],  # one tells itself
    [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
)


def test_messages_in_flight(ranks: RankPool) -> None:
    assert ranks.run(exchanged, world=3) == [[True] * len(SIZES)] * 3
