"""Norms and cross-entropy in torch's own kernels: where that is the same, and where it must not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.plan.task import CallLayouts, Task, search_plan
from autoshard.planning import canonical_capture
from cost_model.mesh import MeshSpec, simulated_groups
from passes.compile.join_kernels import JoinKernels
from passes.layout.layout import Layout, NodeLayouts
from passes.lower.rank_program import rank_program
from passes.rules.core.rule import OpRule
from tests.compile.joined import check_joined, ops_of, program_of
from tests.profiles import slow_compute
from tests.spatial.restricted import restricted


class Normed(nn.Module):
    """Two linears with a norm between them; the sum of squares."""

    def __init__(self, norm: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, width), norm, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x))).square().sum()


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(6),
        nn.LayerNorm(6, eps=0.1),
        nn.LayerNorm(6, bias=False),
        nn.LayerNorm(6, elementwise_affine=False),
        nn.LayerNorm([5, 6]),
    ],
    ids=str,
)
def test_one_kernel_each_way(norm: nn.Module) -> None:
    ops = check_joined(Normed(norm), torch.randn(4, 5, 6))
    assert (ops["native_layer_norm"], ops["native_layer_norm_backward"]) == (1, 1)
    assert ops["rsqrt"] == 0


def test_in_double_precision() -> None:
    ops = check_joined(Normed(nn.LayerNorm(6)).double(), torch.randn(4, 6).double(), tolerance=1e-12)
    assert ops["native_layer_norm_backward"] == 1


def test_gradients_that_nobody_wants_are_not_made() -> None:
    norm = nn.LayerNorm(6).requires_grad_(False)
    _, program = program_of(Normed(norm), [torch.randn(4, 6)])
    graph = program.joined().local.module.graph
    (backward,) = (n for n in graph.nodes if n.target is torch.ops.aten.native_layer_norm_backward.default)
    assert backward.args[-1] == [True, False, False]
    assert check_joined(Normed(norm), torch.randn(4, 6))["native_layer_norm"] == 1


def test_without_gradients() -> None:
    model = Normed(nn.LayerNorm(6)).requires_grad_(False)
    assert check_joined(model, torch.randn(4, 6))["native_layer_norm"] == 1


class Blocks(nn.Module):
    """Three norms, each with a product behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.products = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, product in zip(self.norms, self.products, strict=True):
            x = x + product(norm(x))
        return x.float().square().mean()


def test_moments_are_kept_for_what_is_computed_again() -> None:
    """And not made anew in the backward, of what the forward had cast to float32: that was kept for it."""
    _, program = program_of(Blocks().bfloat16(), [torch.randn(512, 64).bfloat16()], memory_limit=1_000_000)
    forward = program.joined().usual().forward
    assert ops_of(forward)["native_layer_norm"] == 3
    kept = [n.meta["val"] for n in forward.graph.output_node().all_input_nodes]
    whole = [v for v in kept if v.dtype is torch.float32 and v.shape == (512, 64)]
    moments = [v for v in kept if v.shape == (512, 1)]
    assert not whole and len(moments) == 6


class ReadsTheMiddle(nn.Module):
    """A norm by hand, whose normalised values another reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        center = x - x.mean(-1, keepdim=True)
        hat = center * ((center * center).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (hat * self.weight + self.bias).tanh().sum() + hat.sin().sum()


def test_a_norm_whose_middle_is_read_is_one_without_its_weight() -> None:
    ops = check_joined(ReadsTheMiddle().double(), torch.randn(4, 6).double(), tolerance=1e-12)
    assert (ops["native_layer_norm"], ops["rsqrt"]) == (1, 0)


def test_what_is_no_layer_norm_stays() -> None:
    ops = check_joined(Normed(nn.RMSNorm(6)), torch.randn(4, 6))
    assert ops["native_layer_norm"] == 0


def test_the_groups_of_a_group_norm_are_rows() -> None:
    ops = check_joined(Normed(nn.GroupNorm(2, 6)).double(), torch.randn(4, 6).double(), tolerance=1e-12)
    assert ops["native_layer_norm"] == 1


def test_half_precision_is_normalised_in_float32() -> None:
    """As torch does it on GPUs. Weight and bias are in half precision, and stay outside."""
    model, x = Normed(nn.LayerNorm(6)).bfloat16(), torch.randn(4, 6).bfloat16()
    ops = check_joined(model, x, tolerance=0.02)
    assert (ops["native_layer_norm"], ops["native_layer_norm_backward"]) == (1, 1)
    _, program = program_of(model, [x])
    graph = program.joined().local.module.graph
    (kernel,) = (n for n in graph.nodes if n.target is torch.ops.aten.native_layer_norm.default)
    assert kernel.args[0].meta["val"].dtype == torch.float32 and kernel.args[2:4] == (None, None)


def test_rows_that_are_split_stay() -> None:
    mesh, shape = MeshSpec({"a": 2}), (4, 6)
    layout = Layout.of(shape, mesh, ((), ("a",)))

    def keep(rule: OpRule, shapes: Sequence[Sequence[int]], strategy: NodeLayouts) -> bool:
        layouts = (*strategy.operands, *strategy.results)
        return all(
            own.dims == layout.dims for own, of in zip(layouts, shapes, strict=True) if tuple(of) == shape
        )

    x = torch.randn(shape, requires_grad=True)
    captured = canonical_capture(nn.LayerNorm(6), (x,), {})
    call = CallLayouts({0: layout}, {0: layout})
    with restricted(keep):
        plan = search_plan(Task(captured, slow_compute(), mesh, call, {}, None, "eager", 60.0))
    program = rank_program(captured.joint, plan.planned, mesh, 0, simulated_groups(mesh))
    joined = program.joined()
    assert ops_of(joined.local.module)["native_layer_norm"] == 0
    assert joined.text() == replace(program, fused=False).text()


BACKWARD = ("_log_softmax_backward_data", "nll_loss_backward")


class Head(nn.Module):
    """options: of F.cross_entropy."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head = nn.Linear(6, 7)
        self.options = options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), **self.options).sum()


def batch(*lead: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(7, lead, generator=torch.Generator().manual_seed(0))
    y.view(-1)[1] = -100
    return torch.randn(*lead, 6), y


@pytest.mark.parametrize("lead", [(5,), (3, 4)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_is_one_kernel_each_way(lead: tuple[int, ...], reduction: str) -> None:
    ops = check_joined(Head(reduction=reduction), *batch(*lead))
    assert ops["_log_softmax"] == 1
    assert [ops[name] for name in BACKWARD] == [1, 1]
    assert ops["nll_loss_forward"] == 1
    assert ops["_to_copy"] == 0  # the number of targets comes from the kernel
    assert ops["exp"] == ops["amax"] == ops["eq"] == ops["gather"] == ops["neg"] == 0


def test_another_ignored_index_and_smoothing() -> None:
    """The gradient is no longer of picked logarithms alone where labels are smoothed."""
    x, y = batch(5)
    ops = check_joined(Head(ignore_index=3), x, y.clamp(0))
    assert ops["nll_loss_backward"] == ops["nll_loss_forward"] == 1
    ops = check_joined(Head(label_smoothing=0.1), x, y)
    assert ops["_log_softmax"] == ops["_log_softmax_backward_data"] == 1


class OneHot(nn.Module):
    """By hand, with an index that no kernel takes: it picks nothing."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        places = torch.arange(6)
        picked = torch.where(places == y.unsqueeze(-1), -1.0, 0.0)
        return (F.log_softmax(x * x, -1) * picked).sum()


def test_an_index_that_picks_nothing_stays() -> None:
    x = torch.randn(5, 6, requires_grad=True)
    ops = check_joined(OneHot(), x, torch.tensor([0, -1, 3, -1, 5]))
    assert (ops["_log_softmax"], ops["nll_loss_backward"]) == (1, 0)


class AlongRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (F.log_softmax(self.up(x), 0) ** 2).sum()


def test_along_another_dim() -> None:
    ops = check_joined(AlongRows(), torch.randn(4, 6))
    assert (ops["_log_softmax"], ops["_log_softmax_backward_data"]) == (1, 1)


def test_a_sum_of_exponentials_stays() -> None:
    """No softmax: nothing was subtracted, or something else."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            shifted = y - y.amin(-1, keepdim=True)
            return (shifted - shifted.exp().sum(-1, keepdim=True).log()).square().sum()

    assert check_joined(Other(), torch.randn(4, 6))["_log_softmax"] == 0


@pytest.mark.parametrize("same", [True, False])
def test_a_gradient_is_of_the_same_input(same: bool) -> None:
    """Of another one, normalised by these moments, there is no kernel."""

    def both_ways(x: Tensor, other: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.sum([1], True) / 6
        center = x - mean
        deviation = torch.rsqrt((center * center).sum([1], True) / 6 + 1e-5)
        hat = center * deviation
        again = ((x if same else other) - mean) * deviation
        along = again * (tangent * again).sum([1], True)
        gradient = (deviation / 6) * (tangent * 6 - tangent.sum([1], True) - along)
        return hat, gradient

    values = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    module = make_fx(both_ways, tracing_mode="fake")(*values)
    joined = JoinKernels()(module)
    joined.recompile()
    assert ops_of(joined)["native_layer_norm_backward"] == int(same)
    torch.testing.assert_close(joined(*values), both_ways(*values), rtol=1e-12, atol=1e-12)
