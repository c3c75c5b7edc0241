"""Errors of capture, and tensors that no graph holds, since they are not dense: sparse, nested, quantized, oneDNN's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cost_model.errors import CaptureError, UnsupportedOpError
from passes.ir.torch_tracing import NESTED_MAKERS

_COMPRESSED = """to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc sparse_compressed_tensor sparse_csr_tensor
sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor"""
_MAKERS = {**dict.fromkeys(_COMPRESSED.split(), "sparse"), **dict.fromkeys(NESTED_MAKERS, "nested")}
"""Functions that may not run on traced tensors, not even to see what they make: some end the process."""


def refused(what: str, remedy: str, *, model: nn.Module | None = None, at: str | None = "") -> CaptureError:
    """at: the user's line."""
    subject = "cannot capture" if model is None else f"cannot capture {type(model).__name__}"
    line = f"\n  at {at}" if at else ""
    return CaptureError(f"{subject}: {what}{line}\n  try: {remedy}")


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def check_dense(tensor: Tensor, name: str) -> None:
    """CaptureError for a parameter, buffer or argument that is not dense."""
    if not is_dense(tensor):
        kind = _kind(tensor)
        dense = {
            "nested": f"torch.nested.to_padded_tensor({name}, 0.0), and a mask",
            "quantized": f"{name}.dequantize()",
        }.get(kind, f"{name}.to_dense()")
        raise refused(f"{name} is {kind}, not a dense tensor", dense)


def check_dense_call(func: Any, args: Sequence[Any], result: Any = None) -> None:
    """UnsupportedOpError for a call of a torch function that takes, makes or would make such a tensor."""
    name = getattr(func, "__name__", "")
    made = _MAKERS.get(name)
    for value in (*args, result):
        if isinstance(value, Tensor) and not is_dense(value) and name != "__get__":
            made = _kind(value)
    if made == "nested":
        raise UnsupportedOpError(
            "it makes or takes a nested tensor, and graphs hold dense ones\n"
            "  try: a padded tensor and a mask, made before the call"
        )
    if made is not None:
        raise UnsupportedOpError(
            f"{name}() takes or makes a {made} tensor, and graphs hold dense ones\n  try: a dense tensor: .to_dense() "
            "before the model gets it, a mask, or torch.zeros(size).index_put(indices, values, accumulate=True)"
        )


def _kind(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else str(tensor.layout)
