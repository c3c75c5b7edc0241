"""autoshard::routed_mm and routed_outer: rules by the oracle; torch's grouped product as it is captured and run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from autoshard import MeshSpec, find_plan, verify
from cost_model.errors import UnsupportedOpError
from passes.capture.operator_calls import grouped_product
from passes.compile.bind_device import expand_ops
from passes.ir.op_work import global_flops
from passes.ir.torch_compat import fake_mode_of
from passes.ir.torch_tracing import fake_tensors
from passes.ops import routed_ops
from passes.ops.routed_ops import grouped_mm, routed_mm, routed_outer
from passes.rules.check.trial import call_node
from tests.capture.running import check as check_captured
from tests.profiles import slow_compute
from tests.rules.registered import Draw, check

mm, outer = torch.ops.autoshard.routed_mm.default, torch.ops.autoshard.routed_outer.default
grouped = torch.ops.autoshard.grouped_mm.default
IDS = [[[2, 0, 1], [1, 2, 2]], [[0, 0, 0], [0, 3, 0]], [[2, 2, 2], [2, 2, 2]]]


def _mm(a: Tensor, b: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    """By masks, and not by groups as the op does it."""
    return sum(
        ((ids == first + g).to(a.dtype)[..., None] * (a @ b[g]) for g in range(b.shape[0])),
        start=a.new_zeros(1),
    )


def _outer(a: Tensor, b: Tensor, ids: Tensor, count: int, first: int = 0) -> Tensor:
    members = [(ids == first + g).to(a.dtype)[..., None] for g in range(count)]
    return torch.stack([torch.einsum("stm,stn->mn", a * member, b) for member in members])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ids", IDS, ids=str)
def test_values_and_gradients(ids: list[list[int]], first: int) -> None:
    draw, experts = Draw(1), torch.tensor(ids)
    for op, wanted, shapes in (
        (
            lambda a, b: routed_mm(a, b, experts, first, 3),
            lambda a, b: _mm(a, b, experts, first),
            ((2, 3, 4), (3, 4, 5)),
        ),
        (
            lambda a, b: routed_mm(a, b, experts, first, 3, turned=True),
            lambda a, b: _mm(a, b.transpose(1, 2), experts, first),
            ((2, 3, 4), (3, 5, 4)),
        ),
        (
            lambda a, b: routed_outer(a, b, experts, first, 3),
            lambda a, b: _outer(a, b, experts, 3, first),
            ((2, 3, 4), (2, 3, 5)),
        ),
    ):
        a, b = (draw.floats(*shape).requires_grad_() for shape in shapes)
        got, right = op(a, b), wanted(a, b)
        torch.testing.assert_close(got, right)
        grad = draw.floats(*right.shape)
        for ours, theirs in zip(*(torch.autograd.grad(x, (a, b), grad) for x in (got, right)), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_rules() -> None:
    """Every split, and splits of two kinds at once, on 2, 3 and 2 x 2 ranks."""
    draw = Draw(2)
    for ids in map(torch.tensor, IDS[:2]):
        rule = check(mm, draw.floats(2, 3, 4), draw.floats(3, 4, 5), ids, 0, 3)
        assert sorted(rule.splittable) == ["g", "k", "n", "s0", "s1"]
        assert rule.linear == (frozenset({0}), frozenset({1}))
        turned = check(mm, draw.floats(2, 3, 4), draw.floats(3, 5, 4), ids, 0, 3, turned=True)
        assert sorted(turned.splittable) == ["g", "k", "n", "s0", "s1"]
        rule = check(outer, draw.floats(2, 3, 4), draw.floats(2, 3, 5), ids, 0, 3)
        assert sorted(rule.splittable) == ["g", "m", "n", "s0", "s1"]
    # 6 x 4 x 5 multiply-adds: every row has one expert
    a, b = torch.randn(2, 3, 4), torch.randn(3, 4, 5)
    assert global_flops(call_node(mm, (a, b, torch.tensor(IDS[0]), 0, 3))) == 2.0 * 6 * 4 * 5
    turned = call_node(mm, (a, b.mT, torch.tensor(IDS[0]), 0, 3), {"turned": True})
    assert global_flops(turned) == 2.0 * 6 * 4 * 5
    assert (
        global_flops(call_node(outer, (a, torch.randn(2, 3, 5), torch.tensor(IDS[0]), 0, 3)))
        == 2.0 * 6 * 4 * 5
    )


def test_fakes_and_gradient_formulas_agree_with_the_ops() -> None:
    a, b, c = (torch.randn(shape, requires_grad=True) for shape in ((2, 3, 4), (3, 4, 5), (2, 3, 5)))
    torch.library.opcheck(mm, (a, b, torch.tensor(IDS[0]), 0, 3))
    torch.library.opcheck(mm, (a, b.detach().mT, torch.tensor(IDS[0]), 0, 3), {"turned": True})
    torch.library.opcheck(outer, (a, c, torch.tensor(IDS[0]), 0, 3))


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
    assert sum("autoshard.routed" in target for target in targets) == 5  # x needs no gradient
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


def _on_cuda(
    a_shape: list[int], b_shape: list[int], dtype: torch.dtype, first: int, turned: bool
) -> list[torch.fx.Node]:
    """Calls of the expanded op. turned: `a` and `b` are transposes of contiguous tensors, as in a gradient."""
    cuda = torch.device("cuda", 0)
    last = [*range(len(b_shape) - 2), -1, -2]
    shapes = [a_shape[::-1], [b_shape[i] for i in last]] if turned else [a_shape, b_shape]
    looks = [*((shape, dtype) for shape in shapes), ((6,), torch.int32)]
    a, b, ends = fake_tensors([partial(torch.empty, shape, dtype=each, device=cuda) for shape, each in looks])
    with fake_mode_of(a):
        a, b = (x.transpose(-1, -2) if turned else x for x in (a, b))
        node = call_node(grouped, (a, b, ends, first, 4))
        wanted = grouped(a, b, ends, first, 4)
    node.graph.output((node,))
    module = expand_ops(torch.fx.GraphModule(torch.nn.Module(), node.graph))
    out = next(n for n in module.graph.nodes if n.op == "output").args[0][0].meta["val"]
    assert (out.shape, out.stride(), out.dtype, out.device) == (wanted.shape, wanted.stride(), dtype, cuda)
    return [n for n in module.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_on_cuda_torchs_product_runs_where_it_may(first: int, turned: bool) -> None:
    """Groups begin at any token: tokens are the outer dim in memory, or the kernel's addresses are not aligned."""
    for a_shape, b_shape, outer in (([64, 16], [4, 16, 32], (0,)), ([16, 64], [64, 32], (1, 0))):
        nodes = _on_cuda(a_shape, b_shape, torch.bfloat16, first, turned)
        (call,) = [n for n in nodes if str(n.target) == "aten._grouped_mm.default"]
        for operand, dim in zip(call.args, outer, strict=False):
            stride = operand.meta["val"].stride()
            assert stride[1 - dim] == 1 and stride[dim] % 8 == 0
        targets = [str(n.target) for n in nodes]
        assert "autoshard.grouped_mm.default" not in targets
        assert ("aten.index_select.default" in targets) == (first > 0)
        if not turned and len(b_shape) == 3:
            assert "aten.clone.default" not in targets


@pytest.mark.parametrize("kind", ["rows", "summed"])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("ends", [[2, 2, 19, 24], [0, 8, 16, 16], [3, 30, 31, 40]], ids=str)
def test_what_is_made_of_torchs_product_is_the_op(kind: str, first: int, ends: list[int]) -> None:
    """By torch's product on the CPU, which leaves rows of no group undefined too."""
    draw = Draw(3)
    shapes = {"rows": ((24, 8), (2, 8, 16)), "summed": ((8, 24), (24, 16))}[kind]
    a, b = (draw.floats(*shape, dtype=torch.bfloat16) for shape in shapes)
    offs = torch.tensor(ends, dtype=torch.int32)
    got, wanted = routed_ops._fused(a, b, offs, first, 2), grouped_mm(a, b, offs, first, 2)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        ([64, 12], [4, 12, 32], torch.bfloat16),
        ([64, 16], [4, 16, 32], torch.float32),
        ([12, 64], [64, 32], torch.bfloat16),
    ],
    ids=str,
)
def test_on_cuda_the_op_itself_runs_elsewhere(a: list[int], b: list[int], dtype: torch.dtype) -> None:
    assert [str(n.target) for n in _on_cuda(a, b, dtype, 0, False)] == ["autoshard.grouped_mm.default"]


@pytest.mark.parametrize("weight", [Shard(0), Shard(1), Shard(2)], ids=str)
def test_a_plan_with_split_experts_is_right(weight: Shard) -> None:
    """By expert, or by either width: the plan is run on all ranks against the whole model."""
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(12, 8)
    pins = {"up": [weight], "down": [weight]}
    plan = find_plan(model, MeshSpec({"ep": 3}), (x,), profile=slow_compute(), constraints=pins)
    report = verify(model, plan, (x,))
    assert report.ok, str(report)


def test_verify_where_torch_has_no_kernel() -> None:
    """Of float64, in which alone rounding is no excuse."""
    torch.manual_seed(0)
    model, x = Experts().double(), torch.randn(12, 8, dtype=torch.float64)
    plan = find_plan(model, MeshSpec({"ep": 2}), (x,), profile=slow_compute(), constraints={"up": [Shard(0)]})
    report = verify(model, plan, (x,))
    assert report.ok and report.max_error < 1e-12, str(report)


def test_a_product_of_columns_is_captured_as_one_of_rows() -> None:
    a, b, ends = torch.randn(3, 4, 2), torch.randn(2, 5), torch.tensor([1, 1, 4])
    wanted = torch.cat([a[0] @ b[:, :1], a[2] @ b[:, 1:4], torch.zeros(4, 1)], 1)  # column 4 is in no group
    torch.testing.assert_close(grouped_product(a, b, ends), wanted)
