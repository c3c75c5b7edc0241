"""What ops and collectives have for themselves: as torch's allocator was asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.profiler import ProfilerActivity, profile

from cost_model.measure.host_memory import host_memory_of
from passes.ir.torch_compat import allocations
from passes.ops import collective_ops
from passes.ops.layer_ops import uniform_reference
from passes.predict.workspaces import random_words, workspaces_on
from passes.strategies.traffic import eager_traffic, fused_traffic
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank))  # a host for each rank
        made = dist.new_group([0, 1])
        assert host_memory_of(made) is None  # type: ignore[arg-type]
    group, x = made.group_name, torch.ones(LENGTH)  # type: ignore[union-attr]
    wait = c10d.wait_tensor.default
    return {
        "all_gather": most(lambda: wait(collective_ops.all_gather(x, 2, group))),
        "reduce_scatter": most(lambda: wait(collective_ops.reduce_scatter(x, "sum", 2, group))),
        "all_reduce": most(lambda: wait(collective_ops.all_reduce(x, "sum", group))),
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
        assert nbytes == 4 * node.meta["val"].numel() + workspaces_on("cpu", eager_traffic).of_message(
            node
        ), kind
        assert workspaces_on("cuda", eager_traffic).of_message(node) == 0


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
    counted = random_words(node) + 4 * node.meta["val"].numel()
    assert counted <= nbytes <= counted + 64 * sum(shape)
    assert workspaces_on("cpu", eager_traffic).of_op(node) == random_words(node)
    assert workspaces_on("cpu", fused_traffic).of_op(node) == 0


Shape = tuple[int, ...]
CONVOLUTIONS: dict[str, tuple[Shape, Shape, dict[str, object]]] = {
    "alone": ((1, 16, 64, 64), (16, 16, 3, 3), {}),
    "of more channels": ((2, 16, 64, 64), (32, 16, 3, 3), {}),
    "of an image": ((2, 3, 64, 64), (16, 3, 3, 3), {}),
    "grouped": ((2, 32, 32, 32), (32, 8, 3, 3), {"groups": 4}),
    "dilated": ((2, 16, 64, 64), (32, 16, 3, 3), {"dilation": 2, "padding": 2}),
    "strided": ((2, 16, 64, 64), (32, 16, 3, 3), {"stride": 2}),
    "transposed": ((2, 32, 32, 32), (32, 16, 2, 2), {"transposed": True, "stride": 2, "padding": 0}),
    "small": ((1, 16, 16, 16), (32, 16, 3, 3), {}),
    "in float64": ((4, 16, 32, 32), (32, 16, 3, 3), {"dtype": torch.float64}),
    "in bfloat16": ((4, 16, 64, 64), (32, 16, 3, 3), {"dtype": torch.bfloat16}),
}


AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()
MASKS = (None, (True, False, False), (False, True, True), (True, True, True))
# In bfloat16 a gradient of weights has tiles of the processor's besides, which differ from machine to machine.
CALLED = [(name, mask) for name in CONVOLUTIONS for mask in MASKS[: 2 if "bfloat16" in name else 4]]


@pytest.mark.parametrize(("name", "mask"), CALLED)
def test_convolutions_copy_what_they_are_said_to(name: str, mask: tuple[bool, ...] | None) -> None:
    x_shape, w_shape, how = CONVOLUTIONS[name]
    dtype = how.get("dtype", torch.float32)
    assert isinstance(dtype, torch.dtype)
    x, weight = torch.randn(x_shape).to(dtype), torch.randn(w_shape).to(dtype)
    sides = {"stride": 1, "padding": 1, "dilation": 1, **how}
    rest = [[sides[key]] * 2 for key in ("stride", "padding", "dilation")]
    rest += [bool(how.get("transposed")), [0, 0], how.get("groups", 1)]
    graph = fx.Graph()
    if mask is None:
        call = lambda: torch.ops.aten.convolution.default(x, weight, None, *rest)
        operands = (noted(graph, x), noted(graph, weight), None)
        node = graph.call_function(torch.ops.aten.convolution.default, (*operands, *rest))
    else:
        y = torch.ops.aten.convolution.default(x, weight, None, *rest)
        operands = tuple(noted(graph, tensor) for tensor in (y, x, weight))
        call = lambda: torch.ops.aten.convolution_backward.default(y, x, weight, [0], *rest, mask)
        node = graph.call_function(torch.ops.aten.convolution_backward.default, (*operands, [0], *rest, mask))
    made = call()
    node.meta["val"] = made if mask is None else list(made)
    results = [made] if mask is None else [one for one in made if one is not None]
    whole = sum(one.numel() * one.element_size() for one in results)
    counted = whole + workspaces_on("cpu", eager_traffic).of_op(node)
    # Tiles of a processor that has them hold a result in half precision once more.
    tiles = whole if AMX and dtype == torch.bfloat16 else 0
    assert 0.9 * counted <= most(call) <= 1.1 * (counted + tiles)
    assert workspaces_on("cuda", eager_traffic).of_op(node) == 0


def noted(graph: fx.Graph, tensor: torch.Tensor) -> fx.Node:
    node = graph.placeholder("operand")
    node.meta["val"] = tensor
    return node
