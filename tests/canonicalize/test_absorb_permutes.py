from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from autoshard.planning import canonical_capture
from passes.canonicalize.permutes import AbsorbPermutes, MatmulToContract
from passes.ir.graph_pass import GraphPass, shape_of
from passes.ir.joint import JointGraph
from passes.ops.routed_ops import ROUTED, routed_mm
from tests.canonicalize.graphs import applied, ops, ramp, text


@dataclass(frozen=True)
class AbsorbPermutesOfProducts(GraphPass):
    def __call__(self, joint: JointGraph) -> JointGraph:
        return AbsorbPermutes()(MatmulToContract()(joint))


def test_operands_and_result() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.permute(2, 0, 1), w.transpose(1, 2)).permute(2, 1, 0)

    after = applied(AbsorbPermutesOfProducts(), function, ramp(2, 3, 5), ramp(5, 4, 3))
    assert text(after) == ["contract(x0, x1, m k b, b n k -> n m b) -> [4, 2, 5]"]


def test_the_gradient_of_a_weight_is_in_the_weights_order() -> None:
    after = applied(AbsorbPermutesOfProducts(), lambda x, w: x @ w.t(), ramp(2, 3), ramp(4, 3), grads=True)
    assert [line for line in text(after) if line.endswith("[4, 3]")] == [
        "contract(tangent_0, x0, k m, k n -> m n) -> [4, 3]"
    ]


def test_a_product_that_others_read_keeps_its_order() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ y
        return product.t(), product.exp()

    assert ops(applied(AbsorbPermutesOfProducts(), function, ramp(2, 3), ramp(3, 4)))["permute"] == 1


class Expert(nn.Module):
    """Six experts with 3 in and 4 out, stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return routed_mm(x.tanh(), self.weight.transpose(1, 2), ids, 0, 6).square()


def test_matrices_of_experts_are_read_and_made_as_they_are_stored() -> None:
    x, ids = torch.randn(5, 3, requires_grad=True), torch.tensor([5, 0, 0, 2, 5])
    joint = canonical_capture(Expert(), (x, ids), {}).joint
    products = [node for node in joint.graph.nodes if node.target in ROUTED]
    found = [(tuple(shape_of(node)), node.kwargs.get("turned", False)) for node in products]
    assert sorted(found) == [((5, 3), False), ((5, 4), True), ((6, 4, 3), False)]
    assert not any("permute" in str(node.target) for node in joint.graph.nodes)
