"""Graphs written by hand for one rank, and the text of the order that they end up in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.redistribution.lower_redistribute import collective_nodes
from tests.runtime.graphs import Local

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Script(Local):
    """4x4 matrices only; every call names its node."""

    def matrix(self, name: str) -> fx.Node:
        node = self.input(4, 4)
        node.name = name
        return node

    def op(self, name: str, target: Any, *args: Any) -> fx.Node:
        node = self.call(target, *args)
        node.name = name
        return node

    def mm(self, name: str, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.op(name, aten.mm.default, a, b)

    def relu(self, name: str, a: fx.Node) -> fx.Node:
        return self.op(name, aten.relu.default, a)

    def all_reduce(self, name: str, a: fx.Node, turn: int | None = None) -> fx.Node:
        """The value waited for; nodes `name` and `wait_<name>`."""
        started = self.op(name, c10d.all_reduce.default, a, "sum", "axes:tp")
        return self._wait(started, turn)

    def all_gather(self, name: str, a: fx.Node, turn: int | None = None) -> fx.Node:
        """The sum of what two ranks hold, from a gather."""
        started = self.op(name, c10d.all_gather_into_tensor.default, a, 2, "axes:tp")
        waited = self._wait(started, turn)
        return self.op(f"mine_{name}", aten.slice.Tensor, waited, 0, 2, 6)

    def _wait(self, started: fx.Node, turn: int | None) -> fx.Node:
        if turn is not None:
            started.meta["turn"] = (0, turn)
        return self.op(f"wait_{started.name}", c10d.wait_tensor.default, started)


def order(module: fx.GraphModule) -> str:
    return " ".join(n.name for n in module.graph.nodes if n.op == "call_function")


def in_flight(module: fx.GraphModule) -> int:
    """The most collectives started and not waited for at one time."""
    collectives = set(collective_nodes(module.graph))
    flying, most = 0, 0
    for node in module.graph.nodes:
        flying += (node in collectives) - (node.target is c10d.wait_tensor.default)
        most = max(most, flying)
    return most
