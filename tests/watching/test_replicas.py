"""What is compared of a model's parameters and buffers, on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autoshard.watching.check_calls import Replicas
from autoshard.watching.sums import Sum, as_sums, difference
from tests.ranks import RankPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        places = {"whole": [Replicate()] * 2, "part": [Replicate(), Shard(0)], "own": [Shard(0), Shard(1)]}
        for name, placements in places.items():
            whole = torch.arange(1000.0).view(20, 50)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, placements)))
        self.register_buffer("few", torch.ones(3, dtype=torch.bfloat16))
        self.last: Any = None
        self.register_buffer("count", torch.tensor(0))


def sums(rank: int, change: str, by: float) -> list[list[Sum]]:
    """Of some comparisons. change: the parameter whose last value rank 3 changes."""
    net = Net()
    replicas = Replicas(net, ["few", "count", "last"])
    found: list[list[Sum]] = []
    for number in range(60):
        with torch.no_grad():
            if rank == 3 and number == 4 and change:
                tensor = getattr(net, change)
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.view(-1)[-1] *= 1 + by
            figures, values = replicas.sampled(number)
        found.append(as_sums(figures, values))
    return found


def compared(ranks: RankPool, change: str, by: float = 1.0) -> list[str | None]:
    told = ranks.run(sums, change, by)
    return [difference(dict(enumerate(each))) for each in zip(*told, strict=True)]


def test_replicas_of_a_part_are_compared_and_others_are_not(ranks: RankPool) -> None:
    told = ranks.run(sums, "", 0.0)
    names = [[(s.kind, s.name, s.part) for s in mine[0]] for mine in told]
    for rank, mine in enumerate(names):
        part = ("parameter", "part", f"{rank % 2} of S(0)")
        assert mine == [("parameter", "whole", ""), part, ("buffer", "few", "")]
    assert compared(ranks, "") == [None] * 60


def test_one_value_of_a_replica_is_seen_in_time(ranks: RankPool) -> None:
    """Every value of a tensor is in some comparison; of 500 every eighth is in each."""
    found = compared(ranks, "part")
    assert found[:4] == [None] * 4
    seen = next(text for text in found if text is not None)
    assert seen.startswith("the part 1 of S(0) of parameter part is not the same on rank 3 as on rank 1")
    assert compared(ranks, "few")[4] is not None
    assert compared(ranks, "own") == [None] * 60
    assert compared(ranks, "few", 0.004) == [None] * 60, "rounding of bfloat16"
