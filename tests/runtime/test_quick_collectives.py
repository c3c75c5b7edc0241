"""Collectives through shared memory and of one round on real ranks, against hand arithmetic on what every rank is known
to hold."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cost_model.measure.host_memory import host_memory_of
from cost_model.measure.own_collectives import in_one_round
from passes.ops.collective_ops import ALL_REDUCE_IN_PLACE, NAMED_BY_NAME
from tests.ranks import RankPool

wait = torch.ops._c10d_functional.wait_tensor
OPS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
SHAPES = ((3,), (1, 5), (4, 0), (2, 3, 4))
LONG = (20_000,)
"""More than is summed whole, and more than goes in one round."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def held(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank starts from: every rank knows it."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10
    return values.to(dtype)


def group_over(hosts: int) -> dist.ProcessGroup:
    """Of all ranks, new, as if they were on so many hosts: one or as many as ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(dist.get_rank() if hosts > 1 else 0))
        group = dist.new_group(list(range(dist.get_world_size())))
        assert (host_memory_of(group) is None) == (hosts > 1)  # type: ignore[arg-type]
    return group  # type: ignore[return-value]


def started(kind: str, x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    world, name = dist.get_world_size(), group.group_name
    arguments = {
        "all_gather_into_tensor": (world,),
        "all_reduce": (op,),
        "reduce_scatter_tensor": (op, world),
    }
    return NAMED_BY_NAME[kind](x, *arguments[kind], name, "w")


def wanted(kind: str, all_held: list[Tensor], op: str, rank: int) -> Tensor:
    if kind == "all_gather_into_tensor":
        return torch.cat(all_held)
    total = reduce(OPS[op], all_held)
    return total if kind == "all_reduce" else total.chunk(len(all_held))[rank]


def all_cases(rank: int, hosts: int) -> list[str]:
    """What went wrong, of all kinds, shapes and dtypes; several are in flight at a time."""
    group, world, wrong = group_over(hosts), dist.get_world_size(), []
    for dtype in DTYPES:
        flying = []
        for shape in SHAPES if hosts > 1 else (*SHAPES, LONG):
            for kind in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"):
                for op in OPS if "reduce" in kind else ("sum",):
                    rows = shape if kind != "reduce_scatter_tensor" else (world * shape[0], *shape[1:])
                    right = wanted(kind, [held(r, rows, dtype) for r in range(world)], op, rank)
                    flying.append((kind, op, started(kind, held(rank, rows, dtype), op, group), right))
        wrong += [
            f"{kind} {op} {right.shape}" for kind, op, x, right in flying if not torch.equal(wait(x), right)
        ]
    return wrong


@pytest.mark.parametrize(("world", "hosts"), [(2, 1), (3, 1), (4, 1), (3, 3), (4, 4)])
def test_results_are_those_of_hand_arithmetic(ranks: RankPool, world: int, hosts: int) -> None:
    """Bit by bit: they are added up in the order of ranks."""
    assert ranks.run(all_cases, hosts, world=world) == [[]] * world


def in_place(rank: int, hosts: int) -> tuple[bool, list[float]]:
    name = group_over(hosts).group_name
    x = torch.full((3,), float(rank))
    y = wait(ALL_REDUCE_IN_PLACE(x, "sum", name, "w"))
    return y.data_ptr() == x.data_ptr(), x.tolist()


@pytest.mark.parametrize("hosts", [1, 3])
def test_in_place(ranks: RankPool, hosts: int) -> None:
    assert ranks.run(in_place, hosts, world=3) == [(True, [3.0] * 3)] * 3


def of_strides(rank: int) -> tuple[Any, ...]:
    """Of a matrix that lies by columns: the sum, and its strides; and a matrix of which one column was summed."""
    group = group_over(1)
    x = torch.arange(6.0).view(3, 2).t() + rank
    total = wait(started("all_reduce", x, "sum", group))
    table = torch.full((2, 2), float(rank))
    wait(ALL_REDUCE_IN_PLACE(table[:, 1], "sum", group.group_name, "w"))
    return total.tolist(), total.stride(), table.tolist()


def test_operands_may_lie_in_any_order(ranks: RankPool) -> None:
    """Results are contiguous, as torch's are."""
    total = [[1.0, 5.0, 9.0], [3.0, 7.0, 11.0]]
    assert ranks.run(of_strides, world=2) == [
        (total, (3, 1), [[float(rank), 1.0], [float(rank), 1.0]]) for rank in range(2)
    ]


def what_ran(rank: int, hosts: int, numel: int, op: str) -> set[str]:
    group = group_over(hosts)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        wait(started("all_reduce", torch.ones(numel), op, group))
    return {event.key for event in recorded.key_averages() if event.key.startswith("c10d::")}


@pytest.mark.parametrize(
    ("world", "hosts", "numel", "op", "ran"),
    [
        (3, 3, 100, "sum", {"c10d::send", "c10d::recv_"}),
        (3, 3, 2**20, "sum", {"c10d::allreduce_"}),  # much
        (2, 2, 100, "sum", {"c10d::allreduce_"}),  # a ring of two takes no more
        (3, 3, 100, "product", {"c10d::allreduce_"}),
        (3, 1, 2**20, "sum", set[str]()),  # through memory
        (2, 1, 100, "sum", set[str]()),
        (3, 1, 100, "product", {"c10d::allreduce_"}),
    ],
)
def test_what_runs(ranks: RankPool, world: int, hosts: int, numel: int, op: str, ran: set[str]) -> None:
    assert ranks.run(what_ran, hosts, numel, op, world=world) == [ran] * world


def test_how_much_goes_in_one_round() -> None:
    """Of an all-reduce 64 KiB from a rank to all others: 21,845 bytes to each of three."""
    assert in_one_round("all_reduce", torch.empty(5461), 4)
    assert not in_one_round("all_reduce", torch.empty(5462), 4)
    assert in_one_round("all_reduce", torch.empty(3), 4) and in_one_round("all_gather", torch.empty(1), 4)
    assert not in_one_round("all_reduce", torch.empty(2), 4)
    assert in_one_round("all_gather", torch.empty(2**18 // 3), 4)
    assert not in_one_round("all_gather", torch.empty(2**18), 4)
    assert not in_one_round("all_gather", torch.empty(4, device="meta"), 4)


def _of_turned(rank: int) -> dict[str, Tensor]:
    """Of a tensor that lies in memory otherwise than its shape says."""
    x, name = held(rank, (3, 4), torch.float64).t(), group_over(2).group_name
    return {
        "all_gather_into_tensor": wait(NAMED_BY_NAME["all_gather_into_tensor"](x, 2, name, "w")),
        "all_to_all_single": wait(NAMED_BY_NAME["all_to_all_single"](x, [2, 2], [2, 2], name, "w")),
        "reduce_scatter_tensor": wait(NAMED_BY_NAME["reduce_scatter_tensor"](x, "sum", 2, name, "w")),
        "all_reduce": wait(NAMED_BY_NAME["all_reduce"](x, "sum", name, "w")),
    }


def test_operands_may_lie_otherwise_in_memory(ranks: RankPool) -> None:
    a, b = (held(rank, (3, 4), torch.float64).t() for rank in range(2))
    for rank, found in enumerate(ranks.run(_of_turned, world=2)):
        mine = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(found["all_gather_into_tensor"], torch.cat([a, b]))
        torch.testing.assert_close(found["all_to_all_single"], torch.cat([a[mine], b[mine]]))
        torch.testing.assert_close(found["reduce_scatter_tensor"], (a + b)[mine])
        torch.testing.assert_close(found["all_reduce"], a + b)
