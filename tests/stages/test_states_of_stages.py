"""What a later stage computes again are ops of its own forward, by the names that they have in the call's graph."""

from __future__ import annotations

import pytest

from passes.ir.joint import JointGraph
from passes.ir.op_traits import is_view
from passes.stages.stage_graphs import stage_graphs
from passes.states.compute_again import AGAIN, compute_again
from passes.states.offers import candidates, offered
from passes.strategies.traffic import eager_traffic
from tests.plans.pipelines import stage_task


@pytest.fixture(scope="module", params=["mlp", "llama"])
def second(request: pytest.FixtureRequest) -> JointGraph:
    """The second stage of two. Its first op is not the first of its kind in the call."""
    joint = stage_task(request.param).joint
    products = [
        n.name for n in joint.graph.nodes if n.meta.get("phase") == "forward" and "contract" in n.name
    ]
    return stage_graphs(joint, [products[len(products) // 2]])[1].joint


def test_offers_are_of_the_forward(second: JointGraph) -> None:
    nodes = {node.name: node for node in second.graph.nodes}
    offers = offered(second, (), eager_traffic)
    assert {node.name for node in candidates(second, ())} & set(offers.copies.values())
    for copy, op in offers.copies.items():
        found = next(n for n in offers.joint.graph.nodes if n.name == copy)
        assert found.target == nodes[op].target
        assert nodes[op].meta["phase"] == "forward" or is_view(nodes[op])


def test_copies_are_of_the_ops_that_were_named(second: JointGraph) -> None:
    nodes = {node.name: node for node in second.graph.nodes}
    names = [node.name for node in candidates(second, ())]
    copied = compute_again(second, names)
    again = [n for n in copied.graph.nodes if n.meta.get("again") and n.name.endswith(AGAIN)]
    ops = [n for n in again if n.name.removesuffix(AGAIN) in nodes]
    named = [nodes[n.name.removesuffix(AGAIN)] for n in ops]
    assert ops and all(n.target == op.target for n, op in zip(ops, named, strict=True))
    assert {op.meta["phase"] for op in named if not is_view(op)} == {"forward"}
