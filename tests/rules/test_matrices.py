"""Batches of matrices; sampling at places; looking up in sorted rows; what takes the middle of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from passes.rules.check.trial import Choice, Trial, call_node
from passes.rules.core.rule_registry import rule_for
from tests.rules.registered import Draw, aten, check

DRAW = Draw(0)


def _matrices(*batch: int, n: int = 3) -> torch.Tensor:
    return DRAW.floats(*batch, n, n) + n * torch.eye(n, dtype=torch.float64)


A = _matrices(4, 3)
B = DRAW.floats(4, 3, 3, 2)
POSITIVE = A @ A.mT
LOWER = torch.linalg.cholesky(POSITIVE)
LU, PIVOTS = torch.linalg.lu_factor(A)
LD, SWAPS = torch.linalg.ldl_factor(POSITIVE)
QR, TAU = torch.geqrf(A)
VALUES, SORTED = DRAW.floats(4, 5), DRAW.floats(4, 3).sort(-1).values

# Op, arguments, keyword arguments.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "inverse": (aten.linalg_inv_ex.default, (A,), {}),
    "cholesky_ex": (aten.linalg_cholesky_ex.default, (POSITIVE,), {}),
    "cholesky": (aten.cholesky.default, (POSITIVE,), {"upper": True}),
    "cholesky_inverse": (aten.cholesky_inverse.default, (LOWER,), {}),
    "cholesky_solve": (aten.cholesky_solve.default, (B, LOWER), {}),
    "lu_factor": (aten.linalg_lu_factor_ex.default, (A,), {}),
    "lu": (aten.linalg_lu.default, (A,), {}),
    "lu_unpack": (aten.lu_unpack.default, (LU, PIVOTS), {}),
    "lu_solve": (aten.linalg_lu_solve.default, (LU, PIVOTS, B), {}),
    "ldl_factor": (aten.linalg_ldl_factor_ex.default, (POSITIVE,), {}),
    "ldl_solve": (aten.linalg_ldl_solve.default, (LD, SWAPS, B), {}),
    "triangular": (aten.linalg_solve_triangular.default, (LOWER, B), {"upper": False}),
    "triangular_solve": (aten.triangular_solve.default, (B, LOWER, False), {}),
    "qr": (aten.linalg_qr.default, (B,), {}),
    "svd": (aten._linalg_svd.default, (B,), {}),
    "eigh": (aten._linalg_eigh.default, (POSITIVE,), {}),
    "eig": (aten.linalg_eig.default, (A,), {}),
    "eigvals": (aten._linalg_eigvals.default, (A,), {}),
    "matrix_exp": (aten.linalg_matrix_exp.default, (A,), {}),
    "geqrf": (aten.geqrf.default, (A,), {}),
    "householder": (aten.linalg_householder_product.default, (QR, TAU), {}),
    "ormqr": (aten.ormqr.default, (QR, TAU, B), {}),
    "pinv": (
        aten.linalg_pinv.atol_rtol_tensor,
        (A,),
        {"atol": torch.full((4, 1), 1e-9, dtype=torch.float64)},
    ),
    "diagonal": (aten.diagonal.default, (A,), {"offset": 1, "dim1": -2, "dim2": -1}),
    "cross": (aten.linalg_cross.default, (B, DRAW.floats(4, 1, 3, 2)), {"dim": 2}),
}


def test_batches_of_matrices() -> None:
    for name, (op, args, kwargs) in CALLS.items():
        assert {"d0", "d1"} <= set(check(op, *args, **kwargs).splittable), name


def test_one_matrix_for_all() -> None:
    for lower, right in ((LOWER, B[0, 0]), (LOWER[0, 0], B), (LOWER[:, :1], B[:1])):
        found = check(aten.linalg_solve_triangular.default, lower, right, upper=False)
        assert found.splittable == ("d0", "d1")


def test_what_is_not_made_is_empty() -> None:
    assert check(aten._linalg_svd.default, B, False, False).splittable == ("d0", "d1")
    assert check(aten.lu_unpack.default, LU, PIVOTS, True, False).splittable == ("d0", "d1")
    assert check(aten.linalg_qr.default, B, "r").splittable == ("d0", "d1")


def test_diagonals_of_other_dims() -> None:
    assert check(aten.diagonal.default, DRAW.floats(3, 4, 5), -1, 2, 0).splittable == ("d1",)


def test_products_of_integers() -> None:
    a, b = (DRAW.ints(9, *s, low=-9).to(torch.int8) for s in ((20, 5), (5, 9)))
    assert set(check(aten._int_mm.default, a, b).splittable) == {"m", "k", "n"}
    check(aten._int_mm.default, a[:1], b[:, :3])


def test_distances() -> None:
    x, y = DRAW.floats(2, 4, 3), DRAW.floats(2, 5, 3)
    for p in (1.0, 2.0, float("inf")):
        found = aten._cdist_forward.default(x, y, p, None)
        assert set(check(aten._cdist_forward.default, x, y, p, None).splittable) == {"...0", "m", "n"}
        grads = (DRAW.floats(2, 4, 5), x, y, p, found)
        assert set(check(aten._cdist_backward.default, *grads).splittable) == {"...0", "m", "n", "d"}


@pytest.mark.parametrize("space", [2, 3])
def test_sampling_at_places(space: int) -> None:
    mode = space - 2
    x = DRAW.floats(3, 2, *(4, 3, 5)[:space])
    grid = DRAW.floats(3, *(2, 3, 2)[:space], space).clamp(-1.2, 1.2)
    op = getattr(aten, f"grid_sampler_{space}d")
    rule = check(op.default, x, grid, mode, 0, False)
    assert set(rule.splittable) == {"n", "c", *(f"y{i}" for i in range(space))}
    grad = DRAW.floats(*op(x, grid, mode, 0, False).shape)
    back = getattr(aten, f"grid_sampler_{space}d_backward").default
    check(back, grad, x, grid, mode, 0, False, [True, True])
    check(back, grad, x, grid, mode, 0, False, [False, True])


def test_looking_up() -> None:
    row = SORTED[0].contiguous()
    assert check(aten.bucketize.Tensor, VALUES, row).splittable == ("d0", "d1")
    assert check(aten.searchsorted.Tensor, row, VALUES, right=True).splittable == ("d0", "d1")
    assert check(aten.searchsorted.Tensor, row, VALUES[0]).splittable == ("d0",)
    assert check(aten.searchsorted.Tensor, SORTED, VALUES).splittable == ("d0", "d1")
    order = torch.arange(2, -1, -1).expand(4, 3).contiguous()
    check(aten.searchsorted.Tensor, SORTED.flip(1).contiguous(), VALUES, sorter=order)
    whole, some = DRAW.ints(9, 4, 5), DRAW.ints(9, 4, 5)
    assert check(aten.isin.Tensor_Tensor, whole, some).splittable == ("d0", "d1")


def test_the_middle() -> None:
    for op in (aten.median.dim, aten.nanmedian.dim, aten.mode.default):
        assert check(op, VALUES, 1).splittable == check(op, VALUES, 1, True).splittable == ("d0",)
    assert check(aten.kthvalue.default, VALUES, 2, 0).splittable == ("d1",)
    assert check(aten.median.default, VALUES).splittable == ()


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags(mode: int) -> None:
    table, index, ends = DRAW.floats(6, 5), DRAW.ints(6, 7), torch.tensor([0, 3, 3])
    weights = DRAW.floats(7) if mode == 0 else None
    args = (table, index, ends, False, mode, False, weights)
    assert check(aten._embedding_bag.default, *args).splittable == ("d",)
    _, to_bag, sizes, largest = aten._embedding_bag.default(*args)
    to_bag = to_bag if to_bag.numel() else torch.tensor([0, 0, 0, 2, 2, 2, 2])
    grad = DRAW.floats(3, 5)
    tail = (6, False, mode, False, weights)
    rule = check(aten._embedding_bag_backward.default, grad, index, ends, to_bag, sizes, largest, *tail)
    assert rule.splittable == ("d",)
    if mode == 0:
        op = aten._embedding_bag_per_sample_weights_backward.default
        assert check(op, grad, table, index, ends, to_bag, mode).splittable == ("d",)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("grad", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_products_of_float8(by_row: bool, grad: torch.dtype) -> None:
    """Integers and powers of two: every sum is exact, however it is split."""
    splits = (
        (("m", "n", "k"), {"m": 20, "n": 9, "k": 5}),
        (("m", "n", "k"), {"m": 3, "n": 3, "k": 16}),
        (("m", "k"), {"m": 5, "n": 1, "k": 32}),
        ((), {}),
    )
    for factors, sizes in splits:
        m, n, k = (sizes.get(name, 1) for name in "mnk")
        a, b = (DRAW.ints(9, *s, low=-9).float() for s in ((m, k), (n, k)))
        scales = (2.0 ** DRAW.ints(3, m, 1).float(), 0.5 ** DRAW.ints(3, 1, n).float())
        if not by_row:
            scales = torch.tensor(0.5), torch.tensor([4.0])
        args = a.to(grad), b.to(torch.float8_e4m3fn).t(), *scales
        found = check(aten._scaled_mm.default, *args, None, None, torch.float32)
        assert found.splittable == factors
        # A bias is added once, and 8 bits hold no summands.
        biased = check(aten._scaled_mm.default, *args, DRAW.ints(4, n).float(), None, torch.float32)
        narrow = rule_for(call_node(aten._scaled_mm.default, args))
        assert biased.splittable == narrow.splittable == tuple(factor for factor in factors if factor != "k")


def test_rounding_of_a_split_contraction() -> None:
    """Sums of k products in any order are within k 2^-24 of the sum of magnitudes, whole and in parts."""
    m, n, k = 5, 7, 96
    a, b = (DRAW.floats(*s).float().to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
    scales = DRAW.floats(m, 1).float().abs(), DRAW.floats(1, n).float().abs()
    node = call_node(aten._scaled_mm.default, (a, b.t(), *scales), {"out_dtype": torch.float32})
    sizes = a.double().abs() @ b.double().abs().t() * scales[0] * scales[1]
    atol = 2 * (k + 3) * 2.0**-24 * float(sizes.max())
    assert Trial(node, rule_for(node), (3,), (Choice("k"),), rtol=0.0, atol=atol).mismatch() is None
