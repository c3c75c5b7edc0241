from __future__ import annotations

from dataclasses import dataclass

import torch

from passes.canonicalize.permutes import AbsorbPermutes, MatmulToContract
from passes.ir.graph_pass import GraphPass
from passes.ir.joint import JointGraph
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
