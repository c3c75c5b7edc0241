"""Products of experts are as many as a rank has experts, in the search as in its program."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from autoshard.planning import canonical_capture, find_plan
from cost_model.mesh import MeshSpec, simulated_groups
from passes.ir.joint import node_value, tensor_operands
from passes.ir.op_work import routed_products
from passes.lower.rank_program import rank_program
from passes.strategies.prices import local_work, product_groups
from passes.strategies.traffic import eager_traffic
from tests.profiles import slow_compute
from tests.runtime.test_experts import EXPERTS, WIDTH, Experts


def _products(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in routed_products()]


@pytest.mark.parametrize("split", [True, False])
def test_as_many_as_a_rank_has_experts(split: bool) -> None:
    mesh, batch = MeshSpec({"ep": 2}), torch.zeros(4, 6, WIDTH, dtype=torch.float64)
    model, pins = Experts().double(), {name: [Shard(0) if split else Replicate()] for name in ("up", "down")}
    plan = find_plan(model, mesh, (batch,), constraints=pins, profile=slow_compute(1), backend="eager")
    joint = canonical_capture(model, (batch,), {}).joint
    layouts = plan.planned.layouts
    counts: list[int] = []
    for node in _products(joint.graph):
        held, operands = layouts[node.name], tensor_operands(node)
        shape = lambda i, held=held, read=operands: held.operands[i].max_local_shape(
            node_value(read[i]).shape, mesh
        )
        made = lambda i, held=held, one=node: held.results[i].max_local_shape(node_value(one, i).shape, mesh)
        counts.append(product_groups(node, shape, made))
    local = rank_program(joint, plan.planned, mesh, 0, simulated_groups(mesh)).local.module.graph
    run = [local_work(node, eager_traffic(node)).groups for node in _products(local)]
    expected = EXPERTS // 2 if split else EXPERTS
    assert counts == [expected] * 5 and run == counts
