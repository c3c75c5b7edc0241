"""Values of emitted nodes are computed once for equal calls, and are those that computing each would give."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import FakeCalls
from passes.ir.op_traits import op_signature
from passes.ir.torch_dispatch import copied_node
from passes.ir.torch_sizes import fresh_fakes
from passes.lower.partition import _Writer, _Written, partition
from passes.redistribution.redistribute import Redistributor
from tests.models import SwiGLU
from tests.redistribution.layouts import link_prices
from tests.schedule.planned import joint_of, random_assignment, unmerged

aten = torch.ops.aten


def node_of(value: Any) -> fx.Node:
    node = fx.Graph().placeholder("x")
    node.meta["val"] = value
    return node


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


class Counted:
    """An op that counts how often it runs."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op, self.runs = op, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.op(*args, **kwargs)


def test_equal_calls_run_once() -> None:
    calls, op = FakeCalls(), Counted(aten.view.default)
    first = calls(op, (node_of(meta(4, 6)), [2, 12]), {})
    again = calls(op, (node_of(meta(4, 6)), [2, 12]), {})
    assert first is again
    assert op.runs == 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((meta(4, 6, dtype=torch.float64), 2), {}),
        ((meta(4, 8), 2), {}),
        ((meta(6, 4).t(), 2), {}),
        ((meta(4, 6), 3), {}),
        ((meta(4, 6), 2.0), {}),  # equal as a number, another dtype as an operand
        ((meta(4, 6), 2), {"alpha": 2}),
    ],
)
def test_other_calls_run_again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    calls, op = FakeCalls(), Counted(aten.add.Tensor)
    calls(op, (node_of(meta(4, 6)), 2), {})
    calls(op, (node_of(args[0]), *args[1:]), kwargs)
    assert op.runs == 2


@pytest.mark.parametrize("op", [aten.view.default, aten.reshape.default])
@pytest.mark.parametrize(
    ("shape", "strides", "into"),
    [
        ((1, 2, 8, 16, 24), (3072, 3072, 384, 24, 1), (1, 16, 16, 24)),  # gathered parts, of one image
        ((1, 16, 32, 12), (6144, 32, 1, 512), (1, 16, 32, 2, 6)),
    ],
)
def test_a_fake_lies_as_a_tensor_does(
    op: Any, shape: tuple[int, ...], strides: tuple[int, ...], into: tuple[int, ...]
) -> None:
    """In dims of size 1 too: a convolution of the first, with its last dim brought to the front, is channels-last."""
    (fake,) = fresh_fakes([torch.empty_strided(shape, strides)])
    wanted = op(torch.empty_strided(shape, strides), into).stride()
    assert FakeCalls()(op, (node_of(fake), into), {}).stride() == wanted


def looks(module: fx.GraphModule) -> list[tuple[str, Any]]:
    """Every node with what its value looks like."""

    def look(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [look(v) for v in value]
        return None if value is None else (value.shape, value.stride(), value.dtype, value.device)

    return [(n.format_node(), look(n.meta.get("val"))) for n in module.graph.nodes]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SwiGLU(8, 12) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).softmax(-1)
        return x.sum()


class Forgetful(FakeCalls):
    """The plain way: every call is run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._results.clear()
        return super().__call__(*args, **kwargs)


def test_a_rank_s_graph_is_the_same_with_and_without() -> None:
    mesh = MeshSpec({"a": 2, "b": 3})
    joint = joint_of(Twice(), torch.randn(6, 8))
    assignment = random_assignment(joint, mesh, random.Random(0))
    planned = unmerged(joint, assignment, Redistributor(mesh, link_prices(mesh)))

    def graphs(calls: FakeCalls) -> list[list[tuple[str, Any]]]:
        groups, one = simulated_groups(mesh), replace(joint, calls=calls)
        return [looks(partition(one, planned, mesh, rank, groups).module) for rank in (0, 1, 5)]

    assert graphs(Forgetful()) == graphs(FakeCalls())


class Turned(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (torch.cumsum(x, 0) * torch.cumsum(x.t(), 0)).sum()


def test_equal_layers_are_written_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = MeshSpec({"a": 2, "b": 3})
    joint = joint_of(Turned(), torch.randn(8, 8))
    drawn = random_assignment(joint, mesh, random.Random(3))
    first: dict[Any, str] = {}
    ops = {node.name: node for node in joint.graph.nodes if node.op == "call_function"}
    alike = lambda name: first.setdefault(op_signature(ops[name]), name) if name in ops else name
    assignment = {name: drawn[alike(name)] for name in drawn}
    planned = unmerged(joint, assignment, Redistributor(mesh, link_prices(mesh)))

    def written(rank: int) -> list[tuple[str, Any, Any]]:
        module = partition(joint, planned, mesh, rank, simulated_groups(mesh)).module
        metas = [{key: n.meta[key] for key in n.meta if key != "val"} for n in module.graph.nodes]
        return [(*look, meta) for look, meta in zip(looks(module), metas, strict=True)]

    again: list[Any] = []
    copied = lambda self, *args: again.append(self) or plain(self, *args)
    plain = _Written.again
    monkeypatch.setattr(_Written, "again", copied)
    found = [written(rank) for rank in (0, 1, 5)]
    monkeypatch.setattr(_Writer, "_alike", lambda self, same, shape, operands, meta, write: write())
    assert len(again) > 50
    assert found == [written(rank) for rank in (0, 1, 5)]


def test_nodes_are_copied_as_fx_does() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("_7")
    for _ in range(12):
        x = graph.call_function(aten.add.Tensor, (x, y), {"alpha": 2})
        x.meta["val"] = len(graph.nodes)
    graph.call_function(aten.abs.default, (x,))
    graph.create_node("call_function", aten.neg.default, (x,), name="add_tensor_40")
    graph.output((x, None))
    made: list[list[tuple[str, Any]]] = []
    for copy in (fx.Graph.node_copy, copied_node):
        new, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in list(graph.nodes)[:-4]:
            nodes[node] = copy(new, node, nodes.__getitem__)
        for target in (aten.add.Tensor, aten.abs.default):
            new.call_function(target, (nodes[y],))
        for node in list(graph.nodes)[-4:]:
            nodes[node] = copy(new, node, nodes.__getitem__)
        new.call_function(aten.add.Tensor, (nodes[y],))
        new.lint()
        made.append([(n.format_node() or "", n.meta) for n in new.nodes])
    assert made[0] == made[1]


def test_what_is_known_of_a_graph_is_not_said_of_another() -> None:
    joint = joint_of(Twice(), torch.randn(6, 8))
    count = lambda one: one.known("nodes", lambda: [len(one.graph.nodes)])
    assert count(joint) is count(replace(joint, device=torch.device("cuda")))
    smaller = replace(joint, module=fx.GraphModule(joint.module, fx.Graph()))
    assert count(smaller) == [0] and count(joint) == [len(joint.graph.nodes)]
