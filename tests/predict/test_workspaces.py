"""What ops and collectives have for themselves: as torch's allocator was asked for it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.profiler import ProfilerActivity, profile

from passes.ir.torch_compat import allocations
from passes.ops import one_round
from passes.ops.uniform import uniform_reference
from passes.predict.workspaces import copies_on, workspace
from passes.strategies.pricing import eager_traffic, fused_traffic
from tests.ranks import RankPool

c10d = torch.ops._c10d_functional
LENGTH = 2**16


def most(run: object) -> int:
    """Bytes that a call had at once, its result included."""
    assert callable(run)
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    now = peak = 0
    for _, nbytes in allocations(seen):
        now += nbytes
        peak = max(peak, now)
    return peak


def measured(rank: int) -> dict[str, int]:
    group, x = dist.group.WORLD.group_name, torch.ones(LENGTH)  # type: ignore[union-attr]
    wait = c10d.wait_tensor.default
    return {
        "all_gather": most(lambda: wait(one_round.all_gather(x, 2, group))),
        "reduce_scatter": most(lambda: wait(one_round.reduce_scatter(x, "sum", 2, group))),
        "all_reduce": most(lambda: wait(one_round.all_reduce(x, "sum", group))),
    }


def collective(kind: str) -> fx.Node:
    """Of `LENGTH` floats on two ranks."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(LENGTH, device="meta")
    target, args, length = {
        "all_gather": (c10d.all_gather_into_tensor.default, (x, 2, "g"), 2 * LENGTH),
        "reduce_scatter": (c10d.reduce_scatter_tensor.default, (x, "sum", 2, "g"), LENGTH // 2),
        "all_reduce": (c10d.all_reduce.default, (x, "sum", "g"), LENGTH),
    }[kind]
    node = graph.call_function(target, args)
    node.meta["val"] = torch.empty(length, device="meta")
    return node


def test_gloo_copies_what_it_is_said_to(ranks: RankPool) -> None:
    found = ranks.run(measured, world=2)[0]
    for kind, nbytes in found.items():
        node = collective(kind)
        assert nbytes == 4 * node.meta["val"].numel() + copies_on("cpu")(node), kind
        assert copies_on("cuda")(node) == 0


@pytest.mark.parametrize("shape", [(64, 128), (7, 3, 1000)])
def test_random_numbers_op_by_op(shape: tuple[int, ...]) -> None:
    seed, starts = torch.tensor(3), [0] * len(shape)
    graph = fx.Graph()
    node = graph.call_function(
        torch.ops.autoshard.uniform.default, (list(shape), starts, list(shape), graph.placeholder("seed"), 1)
    )
    node.meta["val"] = torch.empty(shape, device="meta")
    nbytes = most(lambda: uniform_reference(shape, starts, shape, seed, 1))
    # Beside the words of an element there are indices of single dims.
    counted = workspace(node, eager_traffic) + 4 * node.meta["val"].numel()
    assert counted <= nbytes <= counted + 64 * sum(shape)
    assert workspace(node, fused_traffic) == 0
