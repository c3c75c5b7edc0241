"""`torch._grouped_mm` (`F.grouped_mm`), which mixtures of experts call, as `autoshard::grouped_mm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cost_model.errors import UnsupportedOpError
from passes.ir.torch_tracing import grouped_mm_functions
from passes.ops.grouped_product import grouped_mm

__all__ = ["GroupedAsCaptured", "grouped_captured", "grouped_product"]


def grouped_captured() -> dict[Any, Callable[..., Any]]:
    """Torch functions to answer otherwise while tracing, for a TorchFunctionMode. `F.grouped_mm` calls the first of
    them; Transformers calls its own op, which is opaque, for dtypes that torch's fakes do not take."""
    replaced: dict[Any, Callable[..., Any]] = dict.fromkeys(grouped_mm_functions(), grouped_product)
    library = torch.ops.transformers
    if hasattr(library, "grouped_mm_fallback"):
        for op in (library.grouped_mm_fallback, library.grouped_mm_fallback.default):
            replaced[op] = grouped_product
    return replaced


class GroupedAsCaptured(TorchFunctionMode):
    """Inside, grouped products for which torch has no kernel (of float64) are computed as they are captured."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in grouped_mm_functions():
            return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            return grouped_product(*args, **(kwargs or {}))


def grouped_product(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same arguments as `torch.nn.functional.grouped_mm`; rows and columns in no group are 0.

    Raises UnsupportedOpError for a bias or another result dtype, which torch's own kernels refuse too.
    """
    if bias is not None:
        raise UnsupportedOpError("grouped_mm: a bias is not supported\n  try: add it to the result")
    if out_dtype is not None and out_dtype != mat_a.dtype:
        raise UnsupportedOpError(
            f"grouped_mm: out_dtype={out_dtype} of operands of {mat_a.dtype} is not supported\n"
            f"  try: grouped_mm(...).to({out_dtype})"
        )
    if mat_a.ndim == 3 and mat_b.ndim == 3:
        return torch.bmm(mat_a, mat_b)
    if offs is None:
        raise UnsupportedOpError(
            f"grouped_mm: operands of {mat_a.ndim} and {mat_b.ndim} dims without offs\n  try: offs, the ends of groups"
        )
    return grouped_mm(mat_a, mat_b, offs, 0, offs.shape[0])
