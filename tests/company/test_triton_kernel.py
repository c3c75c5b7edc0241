"""The example with a Triton kernel, by its path without Triton: one op of the plan, split by its rule."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard import MeshSpec, find_plan, verify
from autoshard.planning import canonical_capture
from passes.ir.torch_inductor import compile_with_inductor
from tests.company.run_examples import example
from tests.profiles import slow_compute
from tests.runtime.graphs import Local

MESH = MeshSpec({"dp": 2, "tp": 2})


@pytest.fixture(scope="module")
def kernel() -> Any:
    return example("triton_kernel")


class Writing(nn.Module):
    """A forward that writes in place is traced in another way, in which torch takes such ops apart."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.clone().mul_(2.0)).mul_(0.5)


def test_its_values_and_gradients_are_torchs(kernel: Any) -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (5,)))
    found = torch.autograd.grad(kernel.rms_norm(x, weight, 1e-6).square().sum(), (x, weight))
    wanted = torch.autograd.grad(F.rms_norm(x, (5,), weight, 1e-6).square().sum(), (x, weight))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_it_is_one_op_that_its_rule_splits(kernel: Any) -> None:
    model = kernel.Model(width=16, hidden=32, layers=1).double()
    x = torch.randn(8, 6, 16, dtype=torch.float64)
    plan = find_plan(model, MESH, (x,), profile=slow_compute())
    assert plan.fallbacks == ()
    (line,) = (line for line in plan.to_text().splitlines() if "= example.rms_norm(" in line)
    assert re.search(r"f64\[8\S*, 6\S*, 16\] = ", line) and {"@dp", "@tp"} <= set(re.findall(r"@\w+", line))
    report = verify(model, plan, (x,))
    assert report.ok and report.max_error < 1e-12, str(report)


def test_it_is_one_op_where_a_forward_writes_in_place(kernel: Any) -> None:
    joint = canonical_capture(Writing(kernel.Model(16, 32, 1)), (torch.randn(4, 6, 16),), {}).joint
    assert [n.target for n in joint.graph.nodes].count(kernel.rms_norm._opoverload) == 1


@pytest.mark.slow
def test_it_runs_as_it_is_in_a_compiled_graph(kernel: Any) -> None:
    local = Local()
    x, weight = local.input(3, 5), local.input(5)
    graph = local.module(local.call(kernel.rms_norm._opoverload, x, weight, 1e-6))
    values = [torch.randn(3, 5), torch.randn(5)]
    call, *_ = compile_with_inductor(graph, values, lambda module: None)
    (result,) = call(list(values))
    torch.testing.assert_close(result, F.rms_norm(values[0], (5,), values[1], 1e-6))
