"""Joint graphs written by hand, right or wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.ir.joint import FakeCalls, GraphInput, GraphOutput, JointGraph
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_sizes import fresh_fakes


@dataclass
class Written:
    """Ops are named as `copy_joint` does. Every one is of layer `up`, from model.py:7."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[GraphInput] = field(default_factory=list)
    mode: Any = field(default_factory=lambda: fake_mode_of(tuple(fresh_fakes([torch.empty(0)]))))

    def input(self, *shape: int, dtype: torch.dtype = torch.float32, kind: Any = "input") -> fx.Node:
        name = f"x{len(self.inputs)}"
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.inputs.append(GraphInput(kind, name, len(self.inputs)))
        return node

    def call(self, target: Any, *args: Any, phase: str = "forward", **kwargs: Any) -> fx.Node:
        packet = getattr(target, "overloadpacket", target)
        node = self.graph.create_node("call_function", target, args, kwargs, name=packet.__name__)
        value = FakeCalls()(target, args, kwargs, self.mode)
        node.meta = {"val": value, "phase": phase, "module": "up", "source": "model.py:7"}
        return node

    def returning(self, *results: fx.Node | None) -> JointGraph:
        self.graph.output(tuple(results))
        outputs = tuple(GraphOutput("output", f"y{i}", i) for i in range(len(results)))
        return JointGraph(fx.GraphModule(torch.nn.Module(), self.graph), tuple(self.inputs), outputs)
