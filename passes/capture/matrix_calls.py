"""`torch.linalg.lstsq` by the pseudo-inverse, as its gradient is: of its results fakes cannot tell the shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cost_model.errors import UnsupportedOpError

__all__ = ["SOLUTIONS"]


_RESULTS: Any = torch.return_types  # it does not name all to type checkers


class _Residuals:
    """Where torch chooses the driver it gives some on a GPU, on a CPU none: what is done with them is an error."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOpError(
            "lstsq: whether there are residuals depends on the device\n"
            "  try: driver='gels', for matrices of full rank, or (A @ solution - B).square().sum(-2)"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls().used


def lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """The same arguments and results as `torch.linalg.lstsq`."""
    if driver not in (None, "gels", "gelsy"):
        raise UnsupportedOpError(
            f"lstsq: driver={driver!r}\n  try: driver='gelsy', which has the same solution"
        )
    vectors = B.ndim == 1 or B.shape == A.shape[:-1]
    right = B.unsqueeze(-1) if vectors else B
    x = torch.linalg.pinv(A, rtol=rcond) @ right
    solution, none = x.squeeze(-1) if vectors else x, A.new_zeros(0)
    if driver == "gels":
        rows, columns = A.shape[-2:]
        residuals = (A @ x - right).abs().square().sum(-2) if rows > columns else none
        return _RESULTS.linalg_lstsq((solution, residuals, none.long(), none))
    rank = torch.linalg.matrix_rank(A, rtol=rcond)
    residuals = _Residuals() if driver is None else none
    return _RESULTS.linalg_lstsq((solution, residuals, rank, none))


SOLUTIONS: dict[Any, Callable[..., Any]] = {torch.linalg.lstsq: lstsq}
"""Torch functions to answer otherwise while tracing."""
