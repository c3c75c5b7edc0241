"""Compiled graphs compute what the graph does, collectives included, and profilers see their names."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.profiler import profile

from cost_model.errors import ShardingError, UnsupportedOpError
from cost_model.measure.own_collectives import SHARED
from passes.compile.bind_device import expand_ops
from passes.compile.compile_graph import _check_order, check_backend, compile_graph
from passes.ir.op_traits import is_collective
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_tracing import fake_tensors
from passes.ops import attention
from tests.ranks import RankPool
from tests.runtime.graphs import Local

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def collectives(group: str) -> fx.GraphModule:
    """Every kind of collective, on values that other ops produce and read, booleans too."""
    local = Local()

    def wait(node: fx.Node) -> fx.Node:
        return local.call(c10d.wait_tensor.default, node)

    x, w = local.input(4, 3, 8), local.input(4, 8)
    gathered = wait(local.call(c10d.all_gather_into_tensor.default, w, 2, group, serves="layers.0.w"))
    y = local.call(torch.ops.autoshard.contract.default, x, gathered, "b s k, n k -> b s n")
    y = local.call(aten.relu.default, y)
    y = wait(local.call(c10d.all_reduce.default, y, "sum", group, serves="layers.0"))
    flat = local.call(aten.view.default, y, [12, 8])
    scattered = local.call(c10d.reduce_scatter_tensor.default, flat, "sum", 2, group, serves="norm")
    z = local.call(aten.mul.Tensor, wait(scattered), 0.5)
    moved = wait(local.call(c10d.all_to_all_single.default, z, [3, 3], [3, 3], group, serves="mixer"))
    mask = local.call(aten.gt.Scalar, moved, 0.0)
    mask = wait(local.call(c10d.all_gather_into_tensor.default, mask, 2, group))
    return local.module(y, moved, mask)


def run_collectives(rank: int, backend: str) -> tuple[list[Tensor], list[str]]:
    assert dist.group.WORLD is not None
    call = compile_graph(collectives(dist.group.WORLD.group_name), backend)
    values = [torch.randn(4, 3, 8) + rank, torch.randn(4, 8) - rank]
    call(list(values))
    results = call(list(values))  # buffers of a finished call must not leak into the next
    with profile() as recorded:
        call(list(values))
    # The names of ranges, as the profiler shows them.
    names = [e.name for e in recorded.events() or () if ": " in e.name and e.name != SHARED]
    return [*values, *results], names  # type: ignore[list-item]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_collectives_run_and_are_named(ranks: RankPool, backend: str) -> None:
    replies = ranks.run(run_collectives, backend, world=2)
    xs, ws = zip(*((values[0], values[1]) for values, _ in replies), strict=True)
    weight = torch.cat(ws)
    y = torch.stack([(x @ weight.t()).relu() for x in xs]).sum(0)
    scattered = y.view(12, 8).chunk(2)  # each rank gets half of twice y, halved again
    moved = [torch.cat([part[3 * r : 3 * r + 3] for part in scattered]) for r in range(2)]
    for rank, (values, names) in enumerate(replies):
        torch.testing.assert_close(values[2], y)
        torch.testing.assert_close(values[3], moved[rank])
        assert torch.equal(values[4], torch.cat(moved) > 0)
        assert names == [
            "all_gather_into_tensor: layers.0.w",
            "all_reduce: layers.0",
            "reduce_scatter_tensor: norm",
            "all_to_all_single: mixer",
        ]


def attention_graph() -> fx.GraphModule:
    local = Local()
    q, k, v = (local.input(2, 3, 5, 8) for _ in range(3))
    result = local.call(torch.ops.autoshard.attention.default, q, k, v, None, True, 0.5)
    out, lse = (local.call(getitem, result, i) for i in range(2))
    grads = local.call(
        torch.ops.autoshard.attention_backward.default, out, q, k, v, None, out, lse, True, 0.5
    )
    seed = local.call(aten.full.default, [], 7, dtype=torch.int64)
    noise = local.call(torch.ops.autoshard.uniform.default, [4, 4], [0, 4], [4, 8], seed, 3)
    return local.module(out, *(local.call(getitem, grads, i) for i in range(3)), noise)


def getitem(values: tuple[Tensor, ...], index: int) -> Tensor:
    return values[index]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_own_ops_are_expanded_and_exact(backend: str) -> None:
    module = attention_graph()
    for node in module.graph.nodes:
        if node.target is getitem:
            import operator

            node.target = operator.getitem
    module.recompile()
    assert not any("autoshard" in str(n.target) for n in expand_ops(module).graph.nodes)
    values = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    expected = module(*values)
    torch.testing.assert_close(expected[0], attention(*values, None, True, 0.5)[0])
    for got, wanted in zip(compile_graph(module, backend)(list(values)), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_graph_given_is_left_as_it_was() -> None:
    module = collectives("nobody")
    before = str(module.graph)
    expand_ops(module)
    assert str(module.graph) == before


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inputs_are_freed_while_it_runs(backend: str) -> None:
    local = Local()
    x = local.input(4, 4)
    call = compile_graph(local.module(local.call(aten.sin.default, x), None), backend)
    inputs = [torch.randn(4, 4)]
    expected = inputs[0].sin()
    sine, nothing = call(inputs)
    torch.testing.assert_close(sine, expected)
    assert nothing is None
    assert inputs == []


def test_reordered_collectives_are_refused() -> None:
    expected = [("all_reduce", ("sum", "g", "a")), ("all_reduce", ("sum", "g", "b"))]
    line = "        torch.ops.autoshard_c10d_functional.all_reduce_.default(buf0, 'sum', 'g', '{}')\n"
    wait = "        torch.ops._c10d_functional.wait_tensor.default(buf0)\n"
    _check_order(expected, line.format("a") + wait + line.format("b") + wait)
    with pytest.raises(
        UnsupportedOpError, match="Inductor changed the collectives of a graph: 2 in the graph"
    ):
        _check_order(expected, line.format("b") + wait + line.format("a") + wait)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(
        ShardingError, match=r"^backend is 'gpu', which is no compiler\n  try: one of .*'eager'"
    ):
        check_backend("gpu")
    check_backend("aot_eager")


def test_any_torch_compile_backend_runs_the_graph() -> None:
    local = Local()
    x = local.input(4, 4)
    call = compile_graph(local.module(local.call(aten.sin.default, x)), "aot_eager")
    value = torch.randn(4, 4)
    torch.testing.assert_close(call([value])[0], value.sin())


def test_a_transfer_is_kept_that_nothing_reads_any_more() -> None:
    """Attention of no rows is computed from nothing; ranks with rows wait for what this one sends."""
    graph, looks = fx.Graph(), [(0, 2, 9, 4)] * 5 + [(0, 2, 9)]
    values = fake_tensors([partial(torch.empty, shape) for shape in looks])
    grad, *others = nodes = [graph.placeholder(f"x{i}") for i in range(6)]
    sent = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (grad, "sum", "0"))
    came = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sent,))
    backward = torch.ops.autoshard.attention_backward.default
    made = graph.call_function(backward, (came, *others[:3], None, *others[3:], True, 0.5))
    for node, value in zip((*nodes, sent, came), (*values, values[0], values[0]), strict=True):
        node.meta["val"] = value
    with fake_mode_of(values[0]):
        made.meta["val"] = backward(*values[:4], None, *values[4:], True, 0.5)
    graph.output((made,))
    expanded = expand_ops(fx.GraphModule(torch.nn.Module(), graph))
    assert [str(node.target) for node in expanded.graph.nodes if is_collective(node)] == [
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.wait_tensor.default",
    ]
