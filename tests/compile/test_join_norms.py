"""Layer norms in torch's own kernels: where that is the same, and where it must not be."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autoshard.plan.task import search_plan
from autoshard.planning import CallLayouts, Task, canonical_capture
from cost_model.mesh import MeshSpec
from passes.layout.assignment import NodeLayouts
from passes.layout.layout import Layout
from passes.lower.rank_program import rank_program
from passes.rules.core.rule import OpRule
from passes.simulate.lockstep import simulated_groups
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
        hat = center * (center.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (hat * self.weight + self.bias).tanh().sum() + hat.sin().sum()


@pytest.mark.parametrize("model", [ReadsTheMiddle(), Normed(nn.RMSNorm(6))], ids=["middle", "rms"])
def test_what_is_no_layer_norm_stays_right(model: nn.Module) -> None:
    ops = check_joined(model, torch.randn(4, 6))
    assert ops["native_layer_norm"] == 0


def test_the_groups_of_a_group_norm_are_rows() -> None:
    ops = check_joined(Normed(nn.GroupNorm(2, 6)).double(), torch.randn(4, 6).double(), tolerance=1e-12)
    assert ops["native_layer_norm"] == 1


def test_half_precision_is_normalised_in_float32() -> None:
    """As torch does it on GPUs. Weight and bias are in half precision, and stay outside."""
    model, x = Normed(nn.LayerNorm(6)).bfloat16(), torch.randn(4, 6).bfloat16()
    assert check_joined(model, x, tolerance=0.02)["native_layer_norm"] == 1
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
    assert joined.text() == program.text()
