"""Products between views as one op: where the same kernel runs, and where it would not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from passes.compile.fuse_eager import call_directly
from passes.compile.join_linears import JoinLinears
from tests.compile.joined import ops_of

aten = torch.ops.aten


def joined(function: Callable[..., object], *values: Tensor) -> Counter[str]:
    """The ops left, which are checked to give the very same numbers."""
    module = make_fx(function)(*values)
    wanted = module(*values)
    JoinLinears()(module)
    torch.testing.assert_close(module(*values), wanted, rtol=0, atol=0)
    ops = ops_of(module)
    call_directly(module)
    torch.testing.assert_close(module(*values), wanted, rtol=0, atol=0)
    return ops


def turned(w: Tensor) -> Tensor:
    return aten.permute.default(w, [1, 0])


def test_a_product_between_views() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return aten.view.default(aten.mm.default(aten.view.default(x, [6, 4]), turned(w)), [2, 3, 5])

    assert joined(product, torch.randn(2, 3, 4), torch.randn(5, 4)) == {"linear": 1}


def test_with_a_bias() -> None:
    def product(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.view.default(aten.addmm.default(b, aten.view.default(x, [6, 4]), turned(w)), [2, 3, 5])

    values = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    assert joined(product, *values) == {"linear": 1}
    flat = lambda x, w, b: aten.addmm.default(b, x, turned(w))
    assert joined(flat, torch.randn(6, 4), *values[1:]) == {"linear": 1}


def test_with_a_matrix_as_it_is() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return aten.view.default(aten.mm.default(aten.view.default(x, [6, 4]), w), [2, 3, 5])

    assert joined(product, torch.randn(2, 3, 4), torch.randn(4, 5)) == {"matmul": 1}


def test_what_is_flattened_otherwise_stays() -> None:
    """Rows of which the last dim is a part, another shape of the result, and what somebody else reads."""
    x, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    into = lambda x, w: aten.view.default(aten.mm.default(aten.view.default(x, [6, 4]), turned(w)), [2, 15])
    assert joined(into, x, w)["linear"] == 1 and joined(into, x, w)["view"] == 2
    other = lambda x, w: aten.mm.default(aten.view.default(x, [2, 12]), w)
    assert joined(other, x, torch.randn(12, 5)) == {"view": 1, "mm": 1}

    def twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        product = aten.mm.default(aten.view.default(x, [6, 4]), w)
        return aten.view.default(product, [2, 3, 5]), product

    assert joined(twice, x, torch.randn(4, 5)) == {"view": 2, "mm": 1}


def test_a_product_that_becomes_a_scalar_stays() -> None:
    """Spectral norm's: a row, a matrix and a column. A scalar has no last dim, whether it comes or goes."""
    leaves = lambda x, w: aten.view.default(aten.mm.default(aten.view.default(x, [1, 4]), w), [])
    assert joined(leaves, torch.randn(4), torch.randn(4, 1)) == {"view": 2, "mm": 1}
    comes = lambda x, w: aten.view.default(aten.mm.default(aten.view.default(x, [1, 1]), w), [5])
    assert joined(comes, torch.randn(()), torch.randn(1, 5)) == {"view": 2, "mm": 1}


def test_what_is_not_contiguous_stays() -> None:
    product = lambda x, w: aten.view.default(aten.mm.default(aten.view.default(x, [6, 4]), w), [2, 3, 5])
    x = torch.randn(2, 3, 8)[..., ::2]
    assert joined(product, x, torch.randn(4, 5)) == {"view": 2, "mm": 1}


def test_ops_that_are_called_directly_are_the_same() -> None:
    def many(x: Tensor, y: Tensor) -> Tensor:
        z = aten.add.Tensor(x, y, alpha=2)
        z = aten.where.self(aten.gt.Scalar(z, 0), aten.neg.default(z), aten.div.Tensor(z, 3.0))
        z = aten.sum.dim_IntList(aten.select.int(aten.cat.default([z, x], 1), 0, 1), [0], True)
        return aten.mul.Tensor(aten.clone.default(z, memory_format=torch.contiguous_format), 2)

    module = make_fx(many)(torch.randn(3, 4), torch.randn(3, 4))
    values = torch.randn(3, 4), torch.randn(3, 4)
    wanted = module(*values)
    left = {str(n.target) for n in call_directly(module).graph.nodes if str(n.target).startswith("aten.")}
    assert left == {"aten.gt.Scalar"}
    torch.testing.assert_close(module(*values), wanted, rtol=0, atol=0)
