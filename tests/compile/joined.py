"""A model's graph on one rank, before and after its kernels are joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from autoshard import find_plan
from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import JointGraph
from passes.lower.rank_program import RankProgram, rank_program
from tests.profiles import slow_compute

__all__ = ["check_joined", "ops_of", "program_of"]


def program_of(
    model: nn.Module, inputs: Sequence[Tensor], memory_limit: int | None = None
) -> tuple[JointGraph, RankProgram]:
    """On one device."""
    mesh = MeshSpec({"a": 1})
    joint = canonical_capture(model, tuple(inputs), {}).joint
    options = {"profile": slow_compute(), "backend": "eager", "memory_limit": memory_limit}
    plan = find_plan(model, mesh, tuple(inputs), **options)
    return joint, rank_program(joint, plan.planned, mesh, 0, simulated_groups(mesh))


def ops_of(*modules: fx.GraphModule) -> Counter[str]:
    """How often each op is in them, by its name without overload."""
    nodes = [node for module in modules for node in module.graph.nodes if node.op == "call_function"]
    return Counter(str(node.target).removeprefix("aten.").rpartition(".")[0] for node in nodes)


def check_joined(model: nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> Counter[str]:
    """The ops of the joined graph, which is checked to give the outputs and gradients of the one before."""
    joint, program = program_of(model, inputs)
    before, after = program.local.module, program.joined().local.module
    generator = torch.Generator().manual_seed(1)
    values: list[Tensor] = []
    for node, spec in zip(joint.placeholders, joint.inputs, strict=True):
        value = node.meta["val"]
        if spec.kind == "input":
            values.append(inputs[spec.index])
        elif spec.kind == "constant":
            values.append(joint.constants[spec.name])
        else:
            values.append(torch.randn(value.shape, dtype=value.dtype, generator=generator))
    with torch.no_grad():
        pairs = list(zip(before(*values), after(*values), strict=True))
    assert any(one is not None for one, _ in pairs)
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)
    return ops_of(after)
