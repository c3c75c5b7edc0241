"""Determinants and solves as factorizations, what is written to diagonals as a choice, and distances of all pairs.

Torch factorizes the transposed matrix if it lies in rows, and the gradient's formula asks the traced tensor for that:
a rank whose part lies otherwise would factorize another matrix than its gradient takes it for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MATRICES"]

aten = torch.ops.aten


def _transposed(a: Tensor) -> bool:
    """Whether torch's kernels factorize, and its formulas expect, the transposed `a`."""
    return a.is_contiguous() and not a.is_complex()


def _factorized(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """LU, pivots and info."""
    return aten.linalg_lu_factor_ex.default(a.mT if _transposed(a) else a)


def _sign(pivots: Tensor) -> Tensor:
    """Of the permutation, 1 or -1: each row that was exchanged with another changes it."""
    exchanged = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype) != pivots
    return 1 - 2 * (exchanged.sum(-1) % 2)


def det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots, _ = _factorized(a)
    return _sign(pivots) * lu.diagonal(0, -2, -1).prod(-1), lu, pivots


def slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, _ = _factorized(a)
    diagonal = lu.diagonal(0, -2, -1)
    return _sign(pivots) * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), lu, pivots


def solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A `b` of the shape of a batch of vectors is one."""
    lu, pivots, info = _factorized(a)
    vectors = b.ndim == 1 or b.shape == a.shape[:-1]
    right = b.unsqueeze(-1) if vectors else b
    x = aten.linalg_lu_solve.default(lu, pivots, right, left=left, adjoint=_transposed(a))
    return x.squeeze(-1) if vectors else x, lu, pivots, info


def trace(a: Tensor) -> Tensor:
    return a.diagonal().sum()


def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """`src` in each row, and there where the column is the row's."""
    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2:]
    before = max(0, -offset)
    each = aten.constant_pad_nd.default(src, [before, rows - before - src.shape[-1]], 0)
    chosen = torch.arange(columns) - torch.arange(rows).unsqueeze(-1) == offset
    return torch.where(chosen, each.unsqueeze(-1), x).movedim((-2, -1), (dim1, dim2))


def diagonal_backward(grad: Tensor, shape: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    return diagonal_scatter(grad.new_zeros(shape), grad, offset, dim1, dim2)


def _pairs(n: int) -> Tensor:
    """Of rows i < j, their place among all [n * n]."""
    i, j = torch.triu_indices(n, n, 1)
    return i * n + j


def pdist_forward(x: Tensor, p: float = 2) -> Tensor:
    n = x.shape[0]
    each = aten._cdist_forward.default(x, x, p, 2)  # without products, as torch's own
    return each.reshape(n * n).index_select(0, _pairs(n))


def pdist_backward(grad: Tensor, x: Tensor, p: float, distances: Tensor) -> Tensor:
    """A pair moves both of its rows."""
    n = x.shape[0]
    one, other = (x.new_zeros(n * n).index_add(0, _pairs(n), t).reshape(n, n) for t in (grad, distances))
    return aten._cdist_backward.default(one + one.mT, x, x, p, other + other.mT)


MATRICES: dict[Any, Callable[..., Any]] = {
    aten._linalg_det.default: det,
    aten._linalg_slogdet.default: slogdet,
    aten._linalg_solve_ex.default: solve_ex,
    aten.trace.default: trace,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.diagonal_backward.default: diagonal_backward,
    aten._pdist_forward.default: pdist_forward,
    aten._pdist_backward.default: pdist_backward,
}
