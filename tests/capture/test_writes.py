"""A program that writes nothing in place is traced without rewriting writes, and its graph is the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from passes.capture import capture, trace
from passes.ir.torch_tracing import AotGraph, has_writes, trace_joint
from tests.capture.running import check
from tests.models import seeded


def _text(graph: AotGraph) -> list[str]:
    """Module and line of each op with it."""
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    ends = dict(zip(placeholders, graph.inputs, strict=True))
    nodes = [n for n in graph.module.graph.nodes if n.op == "call_function"]
    args = [fx.map_arg((n.args, n.kwargs), lambda operand: ends.get(operand, operand)) for n in nodes]
    return [
        f"{n.name} = {n.target} {a} {n.meta['val']} {n.meta.get('custom')}"
        for n, a in zip(nodes, args, strict=True)
    ]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, AotGraph]]:
    """(rewrite_writes, graph) of every trace that came to its end."""
    made: list[tuple[bool, AotGraph]] = []

    def noted(*args: Any, rewrite_writes: bool) -> AotGraph:
        made.append((rewrite_writes, trace_joint(*args, rewrite_writes=rewrite_writes)))
        return made[-1][1]

    monkeypatch.setattr(trace, "trace_joint", noted)
    return made


@pytest.mark.parametrize("name", ("llama", "gpt2", "vit"))
def test_the_graph_is_the_same_either_way(
    name: str, traces: list[tuple[bool, AotGraph]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "has_writes", lambda graph: True)
    model, inputs = seeded(name)
    capture(model, (), inputs)
    (first, plain), (then, rewritten) = traces
    assert (first, then) == (False, True) and not has_writes(plain)
    assert _text(plain) == _text(rewritten)


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.mix, self.write = nn.Linear(4, 4), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        self.write(y)
        return y * 2


@pytest.mark.parametrize(
    "write, plain",
    [(lambda y: y.add_(1), 0), (lambda y: y.clamp_(0, 1), 1), (lambda y: F.silu(y, inplace=True), 1)],
)
def test_a_write_is_rewritten(
    write: Callable[[Tensor], Any], plain: int, traces: list[tuple[bool, AotGraph]]
) -> None:
    """plain: how many traces end that are then thrown away; the usual writes stop theirs."""
    check(Writes(write), torch.randn(3, 4))
    assert [rewritten for rewritten, _ in traces] == [False] * plain + [True]
    assert not has_writes(traces[-1][1])


def test_a_module_that_says_so_is_traced_once(traces: list[tuple[bool, AotGraph]]) -> None:
    capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), (torch.randn(3, 4),), {})
    assert [rewritten for rewritten, _ in traces] == [True]


class Norm(nn.Module):
    """Its backward writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).norm()


def test_nothing_is_said_of_a_trace_that_is_done_again(traces: list[tuple[bool, AotGraph]]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        capture(Norm(), (torch.randn(3, 4),), {})
    assert [rewrite for rewrite, _ in traces] == [True]
    assert not [str(warning.message) for warning in said]


def _through_views(y: Tensor) -> None:
    """`y`, [2, 4], through a view whose dims lie otherwise in memory."""
    other, old = y.view(1, 4, 2).transpose(0, 2), y.detach().clone()
    other[:1, 1:3] = old[0].view(1, 4, 1)[:, :2] * 2
    other[:, 0].copy_(old.view(4, 2)[:1].T + 1)
    other[1].masked_scatter_(old.view(4, 2)[:, :1] > 0, old)


def test_writes_through_a_transposed_view() -> None:
    """What reads the tensor by its other views sees them."""
    check(Writes(_through_views), torch.randn(2, 4))


@pytest.mark.parametrize(
    "write",
    [
        lambda z: z.masked_fill_(torch.tensor([True, False, True])[:, None], 0.0),
        lambda z: z.scatter_(1, torch.zeros(1, 2, 3, 2, dtype=torch.int64), 2.0),
        lambda z: z.index_add_(1, torch.tensor([1, 1]), torch.ones(1, 2, 3, 2)),
        lambda z: z.cumprod_(2),
        lambda z: z[0, :, 0].fill_diagonal_(2.0),
        lambda z: z[0, 0].fill_diagonal_(2.0, wrap=True),
    ],
)
def test_writes_to_heads(write: Callable[[Tensor], Any]) -> None:
    """Split from a dim and moved to the front, so that the way back is no view of what torch makes contiguous."""
    check(Writes(lambda y: write(y.view(1, 3, 2, 2).transpose(1, 2))), torch.randn(1, 3, 4))
