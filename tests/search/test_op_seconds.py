"""`Prices.op_seconds`: what `strategy_seconds` says of each op, though of ops alike it is asked once."""

from __future__ import annotations

import torch

from autoshard.plan.judged import prices_of
from cost_model.mesh import MeshSpec
from cost_model.profile import Profile
from passes.ir.joint import node_value, tensor_operands
from passes.rules.check.trial import call_node
from passes.rules.core.rule_registry import rule_for
from passes.strategies.prices import strategy_seconds
from passes.strategies.strategies import enumerate_strategies

MESH = MeshSpec({"a": 4}, device_type="cuda")


def test_every_op_and_layout_has_its_own_seconds() -> None:
    prices = prices_of(Profile.load("h100"), MESH)
    seen: set[float] = set()
    for rows in (4096, 8192):
        for dtype in (torch.float32, torch.bfloat16):
            x, w = (torch.empty(n, 4096, dtype=dtype, device="meta") for n in (rows, 4096))
            node = call_node(torch.ops.autoshard.contract.default, (x, w, "m k, k n -> m n"))
            rule = rule_for(node)
            shapes = [tuple(node_value(n).shape) for n in tensor_operands(node)]
            for layouts in enumerate_strategies(rule, shapes, [(rows, 4096)], MESH)[:2]:
                flow = prices.traffic(node)
                (expected,) = strategy_seconds(node, rule, [layouts], flow, MESH, prices.compute)
                assert prices.op_seconds(node, layouts) == prices.op_seconds(node, layouts) == expected
                seen.add(float(expected))
    assert len(seen) >= 4
    assert len(prices.known) == 8
