"""Models and graphs split into phases, and how to run them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from passes.capture.trace import decomposition_table
from passes.ir.joint import JointGraph
from passes.lower.phases import Backward, Phases, split_phases
from tests.runtime.graphs import joint_graph

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Block(nn.Module):
    """Norm, attention by hand, MLP: two outputs, one of them often not differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).split(8, -1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        y = x + self.down(F.gelu(self.up(x)))
        return y, y.log_softmax(-1)[..., 0].mean()


def primitive_joint(model: nn.Module, inputs: Sequence[Tensor]) -> JointGraph:
    return joint_graph(model, inputs, decomposition_table())


def split(joint: JointGraph) -> Phases:
    return split_phases(joint.module, joint.inputs, joint.outputs)


def run(joint: JointGraph, phases: Phases, values: Sequence[Tensor]) -> list[Tensor | None]:
    """What the two graphs compute together, in the order of the joint graph's outputs."""
    backward = phases.backward
    assert backward is not None
    leaves = [v for v, i in zip(values, joint.inputs, strict=True) if i.kind != "tangent"]
    tangents = {i.index: v for v, i in zip(values, joint.inputs, strict=True) if i.kind == "tangent"}
    results = phases.forward(*leaves)
    gradients = run_backward(backward, leaves, results, tangents)
    by_kind = {"grad": iter(gradients)}
    outputs = iter(results)
    return [next(by_kind["grad"] if o.kind == "grad" else outputs) for o in joint.outputs]


def run_backward(
    backward: Backward, leaves: Sequence[Tensor], results: Sequence[Tensor], tangents: dict[int, Tensor]
) -> list[Tensor | None]:
    given = [leaves[i] for i in backward.passed] + [results[i] for i in backward.saved]
    return list(backward.module(*given, *(tangents[t.index] for t in backward.tangents)))


def random_values(joint: JointGraph) -> list[Tensor]:
    return [torch.randn(n.meta["val"].shape) for n in joint.placeholders]


def saved_bytes(phases: Phases) -> int:
    """Of values saved beyond inputs and outputs."""
    results = next(n for n in phases.forward.graph.nodes if n.op == "output").args[0]
    extra = results[len(phases.outputs) :]
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in extra)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
