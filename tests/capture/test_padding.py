"""`autoshard::circular_pad` against torch's circular padding, values and gradients; and how that is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import passes.ops as operators
from passes.capture import capture
from passes.capture.operator_calls import pad
from passes.compile.bind_device import expand_ops
from tests.capture.running import check

AMOUNTS = [
    ((2, 3, 5), (1, 2)),
    ((2, 3, 5), (5, 0)),
    ((1, 2, 4, 7), (0, 0, 3, 4)),
    ((1, 2, 4, 7), (7, 7, 0, 1)),
    ((1, 1, 3, 1, 4), (2, 1, 1, 0, 3, 3)),
]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize(("shape", "amounts"), AMOUNTS, ids=str)
def test_values_and_gradients_are_torchs(
    shape: tuple[int, ...], amounts: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = random(shape, dtype).requires_grad_()
    got, wanted = operators.circular_pad(x, amounts), F.pad(x, amounts, mode="circular")
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    weights = random(tuple(wanted.shape), dtype)
    ours, theirs = (torch.autograd.grad(y, x, weights)[0] for y in (got, wanted))
    exact = dtype != torch.bfloat16  # in which the order of a sum shows
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if exact else 3e-2, atol=1e-5 if exact else 3e-2)


@pytest.mark.parametrize(("shape", "amounts"), AMOUNTS, ids=str)
def test_fake_kernels_and_gradients(shape: tuple[int, ...], amounts: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    meta = operators.circular_pad(x.to("meta"), amounts)
    assert meta.shape == F.pad(x, amounts, mode="circular").shape
    assert operators.circular_pad_backward(meta, amounts).shape == x.shape
    leaf = x.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda y: operators.circular_pad(y, amounts).square(), leaf)


@pytest.mark.parametrize("amounts", [(-2, 3, 1, -1), (3, -2, 0, 0), (-1, -1, -1, 0), (0, 0, 0, 0)], ids=str)
def test_negative_amounts_cut(amounts: tuple[int, ...]) -> None:
    x = torch.randn(1, 2, 4, 6)
    torch.testing.assert_close(pad(x, amounts, mode="circular"), F.pad(x, amounts, mode="circular"))


@pytest.mark.parametrize("amounts", [(8, 0, 0, 0), (1, 1), (1, 1, 1), ()], ids=str)
def test_what_torch_refuses_is_refused(amounts: tuple[int, ...]) -> None:
    x = torch.randn(1, 2, 4, 7)
    for function in (F.pad, pad):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function(x, amounts, mode="circular")


def test_other_modes_are_torchs() -> None:
    x = torch.randn(1, 2, 4, 7)
    for mode, value in (("constant", 2.0), ("reflect", None), ("replicate", None)):
        torch.testing.assert_close(pad(x, (1, 2, 2, 0), mode, value), F.pad(x, (1, 2, 2, 0), mode, value))


class Torus(nn.Module):
    """One padding by hand, one by a convolution, one by a transposed one's partner in three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
        self.deep = nn.Conv3d(3, 1, 3, padding=(1, 0, 2), padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        y = self.flat(F.pad(x, (2, 1, 0, 3), mode="circular"))
        return self.deep(y.unsqueeze(2)).square().mean()


def test_capture_makes_one_op_of_each() -> None:
    model, x = Torus(), torch.randn(2, 2, 5, 6, requires_grad=True)
    found = [str(n.target) for n in capture(model, (x,), {}).joint.graph.nodes]
    assert found.count("autoshard.circular_pad.default") == 3
    assert found.count("autoshard.circular_pad_backward.default") == 3
    check(model, x)


def test_it_is_expanded_to_plain_ops() -> None:
    def function(x: Tensor) -> Any:
        y = operators.circular_pad(x, (1, 2, 2, 0))
        return operators.circular_pad_backward(y * y, (1, 2, 2, 0))

    x = torch.randn(2, 4, 5)
    module = make_fx(function, tracing_mode="fake")(x)
    expanded = expand_ops(module)
    assert not any("autoshard" in str(node.target) for node in expanded.graph.nodes)
    torch.testing.assert_close(expanded(x), function(x))
