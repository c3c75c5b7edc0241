"""Until when fused ops read, by hand."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.planning import canonical_capture
from passes.strategies.traffic import eager_traffic, fused_traffic, last_runs


class Chain(nn.Module):
    """exp and its double are one kernel, which runs for the product; the sine of exp is another, later."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.exp()
        y = (2.0 * a) @ w
        return y, (a.sin().transpose(0, 1) @ y)


def test_a_fused_op_runs_with_the_last_of_its_readers() -> None:
    joint = canonical_capture(Chain(), (torch.randn(4, 4), torch.randn(4, 4)), {}).joint
    order = {node: step for step, node in enumerate(joint.graph.nodes)}
    by_name = {node.name: node for node in order}
    fused, eager = last_runs(order, fused_traffic), last_runs(order, eager_traffic)
    assert not fused_traffic(by_name["exp"]).writes
    assert fused[by_name["exp"]] == order[by_name["sin"]] > order[by_name["contract"]]
    assert fused[by_name["mul"]] == order[by_name["mul"]]  # stored: products read it
    assert eager[by_name["exp"]] == order[by_name["exp"]]
