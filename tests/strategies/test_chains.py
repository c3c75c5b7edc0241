"""Chains of windows: which overlapping spans are offered, and that a plan of them computes what the model does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from autoshard import MeshSpec, Plan, find_plan, verify
from autoshard.planning import canonical_capture
from passes.ir.joint import node_values
from passes.ir.op_traits import is_use
from passes.strategies.cuts import NO_CUTS, find_chains, ops_of
from tests.one_search import ONE_SEARCH
from tests.profiles import dear_start


class Stack(nn.Module):
    """The second convolution is strided, so that spans shrink from one to the next."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(2, 2, 3, stride, padding=1) for stride in strides)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x).tanh()
        return x.square().mean()


def test_spans_that_later_windows_read() -> None:
    """12 rows over 3; the last of three reads a row more on each side, what the one before it needs two."""
    joint = canonical_capture(Stack((1, 1, 1)), (torch.randn(1, 2, 12),), {}).joint
    found = find_chains(list(ops_of(joint)), MeshSpec({"a": 3}), NO_CUTS)
    one, two = ((0, 5), (3, 9), (7, 12)), ((0, 6), (2, 10), (6, 12))
    assert one in found["convolution_1"]["y0", ("a",)]
    assert {one, two} <= set(found["convolution"]["y0", ("a",)])


def test_spans_that_earlier_gradients_read() -> None:
    """The same on the way back: of three gradients of inputs the last reads a row more of the one before it."""
    joint = canonical_capture(Stack((1, 1, 1)), (torch.randn(1, 2, 12, requires_grad=True),), {}).joint
    ops = list(ops_of(joint))
    found = find_chains(ops, MeshSpec({"a": 3}), NO_CUTS)
    backward = [node for node, _ in ops if node.name.startswith("convolution_backward")]
    first, second, third = (node.name for node in backward if node_values(node)[0] is not None)
    one, two = ((0, 5), (3, 9), (7, 12)), ((0, 6), (2, 10), (6, 12))
    assert one in found[second]["x0", ("a",)]
    assert {one, two} <= set(found[first]["x0", ("a",)])
    assert third not in found


class Near(nn.Module):
    """Two attentions of which each position sees three."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        before = at[:, None] - at
        for _ in range(2):
            q, k, v = self.project(x)[:, None].chunk(3, -1)
            x = F.scaled_dot_product_attention(q, k, v, (before >= 0) & (before < 3))[:, 0]
        return x.square().mean()


def test_keys_within_a_window_are_brought_once_and_computed_once() -> None:
    joint = canonical_capture(Near(), (torch.randn(1, 12, 2),), {}).joint
    ops = list(ops_of(joint))
    found = find_chains(ops, MeshSpec({"a": 3}), NO_CUTS)
    read = {x for node, _ in ops if node.name.startswith("attention") for x in node.all_input_nodes}
    keys = {node.name for node in read if is_use(node) and node.meta["phase"] == "forward"}
    assert len(keys) == 4 and set(found) == keys
    assert all(((0, 4), (2, 8), (6, 12)) in each["d2", ("a",)] for each in found.values())


def overlapping(plan: Plan, kind: str = "convolution") -> int:
    """Ops of that name of whose first results ranks compute the same."""
    named = (name.rstrip("_0123456789") == kind for name in plan.planned.layouts)
    return sum(
        is_one and layouts.results[0].has_halo
        for is_one, layouts in zip(named, plan.planned.layouts.values(), strict=True)
    )


def test_a_dear_start_makes_a_chain_and_a_cheap_one_none() -> None:
    model, x = Stack((1, 2, 1)).double(), torch.randn(1, 2, 95, dtype=torch.float64)
    mesh, counts = MeshSpec({"a": 3}), []
    for seconds in (1e-9, 1e-3):
        with ONE_SEARCH:
            plan = find_plan(
                model, mesh, (x[..., :32],), profile=dear_start(seconds), in_placements=[Shard(2)]
            )
        counts.append(overlapping(plan))
    assert counts[0] == 0 < counts[1]


def test_a_chain_is_right() -> None:
    """On uneven rows, through a stride, and back."""
    model, x = Stack((1, 2, 1, 1)).double(), torch.randn(1, 2, 96, dtype=torch.float64)
    ends = {"profile": dear_start(1e-3), "in_placements": [Shard(2)]}
    with ONE_SEARCH:
        plan = find_plan(model, MeshSpec({"a": 3}), (x[..., :32],), **ends)  # type: ignore[arg-type]
    assert overlapping(plan) > 0 and overlapping(plan, "convolution_backward") > 0
    report = verify(model, plan, (x,))
    assert report.ok, report
