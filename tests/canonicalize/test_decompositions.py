"""What the decomposition table makes of an op is what torch computes, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from passes.capture.trace import decomposition_table
from tests.canonicalize.functions import FUNCTIONS
from tests.canonicalize.graphs import Function, arguments, joint_of, ops, ramp, run


def eager(
    function: Function, inputs: list[torch.Tensor], tangents: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Outputs, and gradients of the float inputs: torch's own."""
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    results = function(*given)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    wanted = [x for x in given if x.requires_grad]
    heads = [y for y in results if y.requires_grad]
    return [*results, *torch.autograd.grad(heads, wanted, tangents, allow_unused=True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    function, inputs = FUNCTIONS[name]
    joint = joint_of(function, *inputs)
    given = arguments(joint, inputs)
    expected = eager(function, list(inputs), given[len(inputs) :])
    for output, got, want in zip(joint.outputs, run(joint, given), expected, strict=True):
        if want is None:
            assert got is None or not got.any(), output
        else:
            assert got is not None
            torch.testing.assert_close(
                got, want.detach(), rtol=1e-4, atol=1e-5, msg=lambda text, o=output: f"{o}: {text}"
            )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(1),
        lambda x: x.mean(),
        lambda x: x.var(1),
        lambda x: F.group_norm(x, 2),
        lambda x: F.layer_norm(x, (64,)),
        lambda x: F.rms_norm(x, (64,)),
        lambda x: x.softmax(1),
    ],
)
def test_half_precision_adds_up_in_float32(function: Function) -> None:
    x = (1 + ramp(2, 4, 64)).to(torch.bfloat16)
    (got,) = run(joint_of(function, x, grads=False), [x])
    assert got is not None and got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), function(x.float()), rtol=1e-2, atol=1e-2)


def test_a_batch_norm_updates_its_statistics_as_torch_does() -> None:
    x, weight, bias = ramp(4, 3, 5, 5), ramp(3), ramp(3) + 1

    def function(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        mean, variance = mean.clone(), variance.clone()
        return F.batch_norm(x, mean, variance, weight, bias, training=True), mean, variance

    inputs = [x, weight, bias, torch.zeros(3), torch.ones(3)]
    joint = joint_of(function, *inputs, grads=False)
    assert not [op for op in ops(joint) if "norm" in op]
    for got, want in zip(run(joint, inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_ours_win_over_torchs() -> None:
    table = decomposition_table()
    assert table[torch.ops.aten.var_mean.correction].__module__.startswith("passes.")
    assert torch.ops.aten.gelu.default not in table, "pointwise ops stay whole"
