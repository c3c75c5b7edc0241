"""The lockstep simulator: exchanges, freeing, and refusals by their message."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from cost_model.mesh import MeshSpec, simulated_group_name, simulated_groups
from passes.simulate.lockstep import LockstepError, simulate

c10d = torch.ops._c10d_functional
MESH = MeshSpec({"dp": 2, "tp": 2})
Build = Callable[[fx.Graph, fx.Node], Any]


def module(build: Build) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return fx.GraphModule(torch.nn.Module(), graph)


def waited(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    return graph.call_function(c10d.wait_tensor.default, (graph.call_function(target, args),))


def run(builds: list[Build], values: list[torch.Tensor], mesh: MeshSpec = MESH) -> list[tuple[Any, ...]]:
    return simulate([module(build) for build in builds], [[value] for value in values], mesh)


def all_reduce(axes: str, op: str = "sum") -> Build:
    return lambda graph, x: (waited(graph, c10d.all_reduce.default, x, op, f"axes:{axes}"),)


def ranks(values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


def test_groups_follow_the_mesh() -> None:
    values = ranks([1.0, 2.0, 4.0, 8.0])
    for axes, wanted in (("tp", [3, 3, 12, 12]), ("dp", [5, 10, 5, 10]), ("dp,tp", [15] * 4)):
        assert [out[0].item() for out in run([all_reduce(axes)] * 4, values)] == wanted


@pytest.mark.parametrize(("op", "wanted"), [("sum", 9.0), ("avg", 4.5), ("max", 8.0), ("min", 1.0)])
def test_reduction_ops(op: str, wanted: float) -> None:
    mesh = MeshSpec({"tp": 2})
    assert run([all_reduce("tp", op)] * 2, ranks([1.0, 8.0]), mesh)[0][0].item() == wanted


def test_gather_in_the_order_of_the_named_axes() -> None:
    def gather(axes: str) -> Build:
        target = c10d.all_gather_into_tensor.default
        return lambda graph, x: (waited(graph, target, x, 4, f"axes:{axes}"),)

    values = ranks([0.0, 1.0, 2.0, 3.0])
    assert run([gather("dp,tp")] * 4, values)[1][0].tolist() == [0, 1, 2, 3]
    assert run([gather("tp,dp")] * 4, values)[1][0].tolist() == [0, 2, 1, 3]


def test_sums_are_taken_in_rank_order() -> None:
    mesh = MeshSpec({"a": 3})
    values = [torch.tensor([v], dtype=torch.float32) for v in (1e8, 1.0, -1e8)]
    assert (
        run([all_reduce("a")] * 3, values, mesh)[2][0].item()
        == (values[0] + values[1] + values[2]).item()
        == 0.0
    )


def test_reduce_scatter_and_uneven_all_to_all() -> None:
    mesh = MeshSpec({"a": 2})
    scatter: Build = lambda graph, x: (
        waited(graph, c10d.reduce_scatter_tensor.default, x, "sum", 2, "axes:a"),
    )
    out = run([scatter] * 2, [torch.tensor([1, 2]), torch.tensor([10, 20])], mesh)
    assert [o[0].tolist() for o in out] == [[11], [22]]

    def exchange(into: list[int], to: list[int]) -> Build:
        return lambda graph, x: (waited(graph, c10d.all_to_all_single.default, x, into, to, "axes:a"),)

    out = run(
        [exchange([0, 1], [0, 2]), exchange([2, 1], [1, 1])],
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        mesh,
    )
    assert [o[0].tolist() for o in out] == [[3], [1, 2, 4]]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (c10d.all_reduce, ("sum",)),
        (c10d.all_gather_into_tensor, (2,)),
        (c10d.reduce_scatter_tensor, ("sum", 2)),
        (c10d.all_to_all_single, ([1, 1], [1, 1])),
    ],
)
def test_what_arrives_is_contiguous(target: Any, args: tuple[Any, ...]) -> None:
    """Also where a kernel laid out what is sent otherwise than its fake says, as convolutions do on CPUs: the program
    goes on with views that are legal for what ranks receive."""
    build: Build = lambda graph, x: (waited(graph, target.default, x, *args, "axes:a"),)
    sent = torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last)
    received = [out for (out,) in run([build] * 2, [sent, sent], MeshSpec({"a": 2}))]
    in_order = [out for (out,) in run([build] * 2, [sent.contiguous()] * 2, MeshSpec({"a": 2}))]
    assert all(out.is_contiguous() for out in received)
    assert all(map(torch.equal, received, in_order))


def test_observer_sees_every_computed_value_in_order() -> None:
    seen: list[tuple[int, str, Any]] = []
    graph = module(all_reduce("a"))
    inputs = [[value] for value in ranks([1.0, 2.0])]
    simulate(
        [graph] * 2,
        inputs,
        MeshSpec({"a": 2}),
        lambda rank, node, value: seen.append((rank, node.name, value.item())),
    )
    assert [s[1:] for s in seen if s[0] == 1] == [("all_reduce_default", 3.0), ("wait_tensor_default", 3.0)]


def test_a_value_is_freed_after_its_last_use() -> None:
    alive: list[bool] = []
    born: list[weakref.ref[torch.Tensor]] = []

    def build(graph: fx.Graph, x: fx.Node) -> tuple[fx.Node, ...]:
        first = graph.call_function(torch.neg, (x,), name="first")
        second = graph.call_function(torch.neg, (first,), name="second")
        return (graph.call_function(torch.neg, (second,), name="third"),)

    def watch(rank: int, node: fx.Node, value: torch.Tensor) -> None:
        if node.name == "first":
            born.append(weakref.ref(value))
        if node.name == "third":
            alive.append(born[0]() is not None)

    simulate([module(build)], [[torch.ones(2)]], MeshSpec({"a": 1}), watch)
    assert alive == [False]


def test_outputs_may_hold_none() -> None:
    assert simulate([module(lambda graph, x: (x, None))], [[torch.ones(1)]], MeshSpec({"a": 1}))[0][1] is None


def test_ranks_that_wait_for_different_groups() -> None:
    with pytest.raises(LockstepError) as error:
        run([all_reduce("tp"), all_reduce("dp"), all_reduce("tp"), all_reduce("tp")], ranks([1.0] * 4))
    assert str(error.value) == (
        "ranks 0 and 1 wait at different groups:\n"
        "  rank 0: %all_reduce_default = all_reduce[tp](torch.float32 1, sum)\n"
        "  rank 1: %all_reduce_default = all_reduce[dp](torch.float32 1, sum)"
    )


def test_a_rank_that_has_finished() -> None:
    with pytest.raises(LockstepError, match=r"rank 0 waits at %all_reduce.*\n  but rank 1 has finished"):
        run([all_reduce("a"), lambda graph, x: (x,)], ranks([1.0] * 2), MeshSpec({"a": 2}))


def test_disagreements_are_named() -> None:
    mesh = MeshSpec({"a": 2})
    gather: Build = lambda graph, x: (waited(graph, c10d.all_gather_into_tensor.default, x, 2, "axes:a"),)
    with pytest.raises(LockstepError, match="different collectives"):
        run([all_reduce("a"), gather], ranks([1.0] * 2), mesh)
    with pytest.raises(LockstepError, match="different reductions"):
        run([all_reduce("a"), all_reduce("a", "max")], ranks([1.0] * 2), mesh)
    with pytest.raises(LockstepError, match="different sizes"):
        run([gather] * 2, [torch.ones(2), torch.ones(3)], mesh)
    with pytest.raises(LockstepError, match="different collectives"):
        run([gather] * 2, [torch.ones(2), torch.ones(2, dtype=torch.float64)], mesh)

    def exchange(into: list[int], to: list[int]) -> Build:
        return lambda graph, x: (waited(graph, c10d.all_to_all_single.default, x, into, to, "axes:a"),)

    with pytest.raises(LockstepError, match="different split sizes"):
        run([exchange([1, 1], [1, 1]), exchange([0, 1], [1, 1])], [torch.ones(2)] * 2, mesh)
    with pytest.raises(LockstepError, match="do not fit 2 ranks"):
        run([exchange([1, 1], [1, 2])] * 2, [torch.ones(2)] * 2, mesh)


def test_a_real_group_name_is_refused() -> None:
    build: Build = lambda graph, x: (graph.call_function(c10d.all_reduce.default, (x, "sum", "7")),)
    with pytest.raises(LockstepError, match="'7' is not a simulated group"):
        simulate([module(build)], [[torch.ones(1)]], MeshSpec({"a": 1}))


def test_group_names() -> None:
    groups = simulated_groups(MESH)
    assert groups["tp", "dp"] == simulated_group_name(("tp", "dp")) == "axes:tp,dp"
    for bad in ((), ("pp",), ("tp", "tp")):
        with pytest.raises(KeyError):
            groups[bad]
