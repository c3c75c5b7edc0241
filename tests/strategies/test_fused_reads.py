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


class Biased(nn.Module):
    """sin(x w + b) and sin(x w + x v): their cosines are read by the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w + self.b).sin() + (x @ self.w.t() + x @ self.v).sin()


def test_what_is_made_of_one_stored_value_is_not_stored_for_the_backward() -> None:
    joint = canonical_capture(Biased(), (torch.randn(8, 4),), {}).joint
    sums = [
        n for n in joint.graph.nodes if str(n.target) == "aten.add.Tensor" and n.meta["phase"] == "forward"
    ]
    assert [fused_traffic(n).writes for n in sums] == [False, True, True]


def test_what_is_stored_nowhere_runs_in_every_phase_that_reads_it() -> None:
    joint = canonical_capture(Biased(), (torch.randn(8, 4),), {}).joint
    sums = [n for n in joint.graph.nodes if str(n.target) == "aten.add.Tensor"]
    assert [fused_traffic(n).runs for n in sums[:2]] == [2, 1]
    cosines = [n for n in joint.graph.nodes if str(n.target) == "aten.cos.default"]
    assert sorted(fused_traffic(n).reads for n in cosines) == [(False,), (True,)]


class Product(nn.Module):
    """Of two inputs: storing it and reading it moves as many bytes as reading both once more."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sin().sum()


def test_what_is_made_of_as_much_as_storing_it_moves_is_stored() -> None:
    joint = canonical_capture(Product(), (torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)), {}).joint
    first, *_ = (n for n in joint.graph.nodes if str(n.target) == "aten.mul.Tensor")
    assert fused_traffic(first).writes


class Long(nn.Module):
    """Every value is read twice by the next, so that there are more ways through it than can be walked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = x * 0.5 + x.sin()
        return x.sum()


def test_a_chain_longer_than_a_loop_is_stored_for_the_backward() -> None:
    joint = canonical_capture(Long(), (torch.randn(4, 4, requires_grad=True),), {}).joint
    sums = [
        n for n in joint.graph.nodes if str(n.target) == "aten.add.Tensor" and n.meta["phase"] == "forward"
    ]
    flows = [fused_traffic(n) for n in sums]
    assert [flow.writes for flow in flows[:5]] == [False] * 5
    assert [flow.runs for flow in flows[:5]] == [2] * 5
    assert all(flow.writes for flow in flows[40:-1])
