from __future__ import annotations

import torch

from passes.canonicalize import canonicalize
from tests.canonicalize.graphs import assert_same, assert_valid, joint_of, ops, ramp, run


def filtered(x: torch.Tensor) -> torch.Tensor:
    """The copy that makes a conjugate a tensor like others is one the pipeline drops."""
    z = torch.view_as_complex(x)
    return torch.view_as_real(z.conj().t().resolve_conj()) + (z.conj().imag * z.real).sum()


def test_conjugates_are_computed() -> None:
    """Values and gradients stay; no value is a note on another's memory."""
    before = joint_of(filtered, ramp(3, 3, 2))
    assert {"_conj", "_neg_view"} <= set(ops(before))
    after = canonicalize(before)
    assert not {"_conj", "_neg_view"} & set(ops(after))
    assert_valid(after)
    assert_same(before, after, [ramp(3, 3, 2)])
    for node in after.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or not (value.is_conj() or value.is_neg()), node


def turned(x: torch.Tensor) -> torch.Tensor:
    z = torch.exp(1j * x) * (2 - 3j) / (1 + 1j)
    return (z.angle() * z.abs() + (x * 2j).imag).sum()


def test_conjugates_of_numbers() -> None:
    """The gradient of a product with a Python number asks for the conjugate of the number."""
    x = ramp(3, 3).double().requires_grad_()
    before = joint_of(turned, x.detach())
    assert any(node.args[:1] == (-2j,) or node.args[:1] == (2j,) for node in before.graph.nodes)
    (grad,) = torch.autograd.grad(turned(x), x)
    _, found = run(canonicalize(before), [x.detach(), torch.ones((), dtype=torch.float64)])
    torch.testing.assert_close(found, grad, rtol=1e-12, atol=1e-12)
