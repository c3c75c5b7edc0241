"""autoshard::grouped_mm: its rule by the oracle, and torch's grouped product as it is captured."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import UnsupportedOpError
from passes.capture.grouped import grouped_product
from passes.expand_ops import expand_ops
from passes.op_kinds import global_flops
from passes.ops.grouped import grouped_mm
from passes.rules.trial import call_node
from passes.torch_compat import fake_mode_of, fake_tensors
from tests.capture.running import check as check_captured
from tests.profiles import slow_compute
from tests.rules.registered import Draw, check

op = torch.ops.autoshard.grouped_mm.default
ENDS = [[2, 2, 5], [0, 3, 4], [5, 5, 5], [1, 2, 3]]


def _loop(a: Tensor, b: Tensor, ends: list[int]) -> Tensor:
    """By masks, and not by slices as the op does it."""
    length = a.shape[0] if b.ndim == 3 else b.shape[1] if a.ndim == 3 else a.shape[1]
    place, begin, parts = torch.arange(length), 0, list[Tensor]()
    for group, end in enumerate(ends):
        member = ((place >= begin) & (place < end)).to(a.dtype)
        if b.ndim == 3:
            parts.append((a * member[:, None]) @ b[group])
        elif a.ndim == 3:
            parts.append(a[group] @ (b * member))
        else:
            parts.append((a * member) @ b)
        begin = end
    return torch.stack(parts) if a.ndim == b.ndim else torch.stack(parts).sum(0)


SHAPES = {"rows": ((5, 4), (3, 4, 2)), "columns": ((3, 4, 2), (2, 5)), "summed": ((4, 5), (5, 2))}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_values_and_gradients(kind: str, ends: list[int]) -> None:
    draw = Draw(1)
    a, b = (draw.floats(*shape).requires_grad_() for shape in SHAPES[kind])
    got, wanted = grouped_mm(a, b, torch.tensor(ends), 0, 3), _loop(a, b, ends)
    torch.testing.assert_close(got, wanted)
    grad = draw.floats(*wanted.shape)
    for ours, theirs in zip(*(torch.autograd.grad(x, (a, b), grad) for x in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("kind", "splittable"), [("rows", "lngk"), ("columns", "mlgk"), ("summed", "gmnl")])
def test_rule(kind: str, splittable: str) -> None:
    """Every split, and splits of two kinds at once, on 2, 3 and 2 x 2 ranks."""
    draw = Draw(2)
    a, b = (draw.floats(*shape) for shape in SHAPES[kind])
    for ends in ENDS[:2]:
        rule = check(op, a, b, torch.tensor(ends, dtype=torch.int32), 0, 3)
        assert sorted(rule.splittable) == sorted(splittable)
        assert rule.linear == (frozenset({0}), frozenset({1}))
    # 4 x 5 x 2 multiply-adds: every place is in one group
    assert global_flops(call_node(op, (a, b, torch.tensor(ENDS[0]), 0, 3))) == 2.0 * 4 * 5 * 2


def test_fakes_and_gradient_formula_agree_with_the_op() -> None:
    for first in SHAPES.values():
        a, b = (torch.randn(shape, requires_grad=True) for shape in first)
        torch.library.opcheck(op, (a, b, torch.tensor([2, 2, 5], dtype=torch.int32), 0, 3))


class Experts(nn.Module):
    """Tokens sorted by expert, two grouped products, and back, as Transformers has it."""

    def __init__(self, product: object = None) -> None:
        super().__init__()
        self.product = product
        self.router = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.down = nn.Parameter(torch.randn(4, 8, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        scores, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = (expert[:, None] == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        product = F.grouped_mm if self.product is None else self.product
        hidden = product(x[order], self.up.transpose(1, 2), offs=ends).relu()  # type: ignore[operator]
        y = product(hidden, self.down.transpose(1, 2), offs=ends)  # type: ignore[operator]
        return y[order.argsort()] * scores[:, None]


@pytest.mark.parametrize(
    "product", [None, torch._grouped_mm, torch.ops.aten._grouped_mm], ids=["F", "torch", "aten"]
)
def test_captured_from_torchs_names(product: object) -> None:
    captured = check_captured(Experts(product), torch.randn(12, 8), rtol=1e-4, atol=1e-5)
    targets = [str(node.target) for node in captured.joint.graph.nodes]
    assert targets.count("autoshard.grouped_mm.default") == 5  # x needs no gradient
    assert not any("aten._grouped_mm" in target for target in targets)


def test_two_stacks_are_a_batched_product() -> None:
    a, b = torch.randn(3, 4, 2), torch.randn(3, 2, 5)
    torch.testing.assert_close(grouped_product(a, b), a @ b)


def test_refusals() -> None:
    a, b, ends = torch.randn(5, 4), torch.randn(3, 4, 2), torch.tensor([1, 2, 5])
    with pytest.raises(UnsupportedOpError, match=r"a bias is not supported\n  try: add it"):
        grouped_product(a, b, ends, bias=torch.randn(2))
    with pytest.raises(UnsupportedOpError, match=r"out_dtype=torch.float64 of operands of torch.float32"):
        grouped_product(a, b, ends, out_dtype=torch.float64)
    with pytest.raises(UnsupportedOpError, match=r"operands of 2 and 3 dims without offs\n  try: offs"):
        grouped_product(a, b)


def _targets_on_cuda(dtype: torch.dtype, k: int, first: int) -> list[str]:
    cuda = torch.device("cuda", 0)
    shapes = (((64, k), dtype), ((4, k, 32), dtype), ((6,), torch.int32))
    a, b, ends = fake_tensors([(shape, t, cuda, False) for shape, t in shapes])
    with fake_mode_of(a):
        node = call_node(op, (a, b, ends, first, 4))
    node.graph.output((node,))
    module = expand_ops(torch.fx.GraphModule(torch.nn.Module(), node.graph))
    out = next(n for n in module.graph.nodes if n.op == "output").args[0][0].meta["val"]
    assert out.shape == (64, 32) and out.is_contiguous() and out.dtype == dtype and out.device == cuda
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


def test_on_cuda_torchs_product_runs_where_it_may() -> None:
    for first in (0, 2):
        found = _targets_on_cuda(torch.bfloat16, 16, first)
        assert "aten._grouped_mm.default" in found and "autoshard.grouped_mm.default" not in found
        assert ("aten.index_select.default" in found) == (first > 0)
        assert "aten.clone.default" not in found
    for dtype, k in ((torch.bfloat16, 12), (torch.float32, 16)):
        assert _targets_on_cuda(dtype, k, 0) == ["autoshard.grouped_mm.default"]


@pytest.mark.parametrize("weight", [Shard(0), Shard(1), Shard(2)], ids=str)
def test_a_plan_with_split_experts_is_right(weight: Shard) -> None:
    """By expert, or by either width: the plan is run on all ranks against the whole model."""
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(12, 8)
    pins = {"up": [weight], "down": [weight]}
    plan = find_plan(model, MeshSpec({"ep": 3}), (x,), profile=slow_compute(), constraints=pins)
    report = verify(model, plan, (x,))
    assert report.ok, str(report)
