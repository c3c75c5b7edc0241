"""Rows of experts count on the ranks of these: which ops keep that, where it ends, and that any routing is right."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard import MeshSpec, find_plan, verify
from passes.canonicalize import canonicalize
from passes.canonicalize.mark_rows import regions
from passes.capture import capture
from passes.ops.routed_ops import routed_mm
from tests.profiles import slow_compute

EXPERTS, WIDTH, PAIRS = 6, 16, (4, 8, 2)


class Layer(nn.Module):
    """Two products with experts, the first with a bias by expert, gated, weighed and added up by token."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.inner(x)
        rows = x[:, :, None, :].expand(*ids.shape, WIDTH)
        gate, up = (routed_mm(rows, self.up, ids, 0, EXPERTS) + self.bias[ids]).chunk(2, -1)
        y = routed_mm(torch.tanh(gate) * up.cos(), self.down, ids, 0, EXPERTS) * weights.sigmoid()[..., None]
        return (x + y.sum(2)).square().mean()


class Twice(nn.Module):
    """One expert a token, and no attention between: rows of one routing lead to products of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.second = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, ids: Tensor, others: Tensor) -> Tensor:
        for which in (ids, others):
            x = x + routed_mm(x, self.first, which, 0, EXPERTS).tanh()
            x = routed_mm(x.cos(), self.second, which, 0, EXPERTS)
        return x.square().mean()


ROUTINGS = {
    "random": lambda: torch.randint(0, EXPERTS, PAIRS),
    "to one expert": lambda: torch.full(PAIRS, 4),
    "to the first two": lambda: torch.randint(0, 2, PAIRS),
}


def routed_call(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.randn(PAIRS, dtype=torch.float64, requires_grad=True)
    return torch.randn(*PAIRS[:2], WIDTH, dtype=torch.float64), ids, weights


def test_ops_between_products_are_marked() -> None:
    joint = canonicalize(capture(Layer().double(), routed_call(ROUTINGS["random"]()), {}).joint)
    (region,) = regions(joint.graph)
    inside = {str(node.target).split(".")[1] for node in region.rows if "getitem" not in node.name}
    assert {"tanh", "cos", "add", "mul", "index", "split_with_sizes", "routed_mm"} <= inside
    assert all("rows" in node.meta for node in region.rows if node.target is not operator.getitem)


@pytest.mark.parametrize(
    "axes",
    [
        {"ep": 2},
        {"dp": 2, "ep": 2},
        pytest.param({"ep": 3}, marks=pytest.mark.slow),
        pytest.param({"ep": 4}, marks=pytest.mark.slow),  # the last rank has no expert
    ],
    ids=str,
)
def test_experts_and_ranks_without_rows(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, call = Layer().double(), routed_call(ROUTINGS["random"]())
    pin: list[Placement] = [Shard(0) if axis == "ep" else Replicate() for axis in axes]
    pins: dict[str, list[Placement]] = dict.fromkeys(("up", "bias", "down"), pin)
    plan = find_plan(model, MeshSpec(axes), call, profile=slow_compute(1), constraints=pins)
    products = [node for node in plan.planned.nodes if node.op == "routed_mm"]
    assert all(("ep", "routed") in product.results[0].layout.partial for product in products)
    for name, routing in ROUTINGS.items():
        report = verify(model, plan, routed_call(routing()))
        assert report.ok, f"{name}: {report}"
        assert report.max_error < 1e-12, name


def test_rows_of_two_routings_are_told_apart() -> None:
    torch.manual_seed(0)
    call = (
        torch.randn(24, WIDTH, dtype=torch.float64),
        *(torch.randint(0, EXPERTS, (24,)) for _ in range(2)),
    )
    model = Twice().double()
    pins = {"first": [Shard(0)], "second": [Shard(0)]}
    plan = find_plan(model, MeshSpec({"ep": 2}), call, profile=slow_compute(1), constraints=pins)
    report = verify(model, plan, call)
    assert report.ok and report.max_error < 1e-12, str(report)
    joint = canonicalize(capture(model, call, {}).joint)
    one, two = regions(joint.graph)
    assert one.rows and two.rows and not one.rows & two.rows


class OneToken(nn.Module):
    """One token has as many rows as a product of its row with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = routed_mm(x, self.weight, ids, 0, EXPERTS)
        return torch.linalg.eigvalsh(y @ y.mT).sum()


def test_ops_of_several_results_end_rows() -> None:
    torch.manual_seed(0)
    model = OneToken().double()
    call = (torch.randn(1, WIDTH, dtype=torch.float64), torch.tensor([3])), {}
    plan = find_plan(model, MeshSpec({"a": 2}), call, profile=slow_compute(1))
    report = verify(model, plan, call)
    assert report.ok, report
    assert report.max_error < 1e-12
