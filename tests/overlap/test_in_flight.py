"""Gathers in flight on gloo: whole, and started by the op that two threads of a rank may finish at once."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from passes.ops.named_collective import NAMED_BY_NAME
from tests.ranks import RankPool

FLYING = 8


def gathered(rank: int) -> tuple[bool, set[str]]:
    """Whether FLYING gathers of rank + number arrived whole, and the c10d ops that ran."""
    group = dist.group.WORLD
    assert group is not None
    gather = NAMED_BY_NAME["all_gather_into_tensor"]
    world, name = dist.get_world_size(), group.group_name
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        flying = [gather(torch.full((2, 3), float(rank + n)), world, name, "w") for n in range(FLYING)]
        found = [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in flying]
    ranks = torch.arange(world).repeat_interleave(2).unsqueeze(1).expand(-1, 3)
    whole = all(torch.equal(tensor, ranks + float(n)) for n, tensor in enumerate(found))
    return whole, {event.key for event in recorded.key_averages() if event.key.startswith("c10d::")}


def test_gathers_in_flight(ranks: RankPool) -> None:
    """Not by allgather_into_tensor_coalesced_, several of which crash gloo now and then (decision 0010)."""
    assert ranks.run(gathered, world=3) == [(True, {"c10d::_allgather_base_"})] * 3
