"""Networks that move data along split space: simulated, and with the ops that move it split along what they move."""

from __future__ import annotations

import pytest
import torch

from autoshard import MeshSpec, find_plan, verify
from passes.canonicalize import canonicalize
from passes.capture import capture
from passes.rules.core.rule_registry import rule_for
from tests.profiles import slow_compute
from tests.spatial.networks import network

CASES = [
    ("rolling", {"a": 3}, "slice slice_backward constant_pad_nd cat roll"),
    ("moving", {"a": 2, "b": 2}, "slice constant_pad_nd cat flip"),
    ("circles", {"a": 5}, "circular_pad circular_pad_backward"),
    ("pixels", {"a": 3}, "convolution convolution_backward reshape"),
]
"""Network, mesh, and the ops that are split along a dim that they move, cut up or see through a window."""


@pytest.mark.parametrize(("name", "axes", "split"), CASES, ids=str)
def test_simulated(name: str, axes: dict[str, int], split: str) -> None:
    model, x = network(name, 1, torch.float64)
    plan = find_plan(model, MeshSpec(axes), (x,), profile=slow_compute())
    found: set[str] = set()
    for node in canonicalize(capture(model, (x,), {}).joint).graph.nodes:
        if node.op == "call_function" and node.name in plan.planned.layouts:
            rule = rule_for(node)
            factors = {part.factor for part in plan.planned.layouts[node.name].splits}
            seen = {rule.operands_and_results[t][d][0] for t, d in rule.windows}
            cut = {dim[0] for tensor in rule.operands_and_results for dim in tensor if len(dim) > 1}
            if factors & (seen | cut):
                found.add(str(node.target).split(".")[1])
    assert set(split.split()) <= found
    report = verify(model, plan, (x,))
    assert report.ok, report
