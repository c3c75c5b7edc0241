"""float32 in full on GPUs, whatever the script allows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["full_float32"]


@contextmanager
def full_float32() -> Generator[None]:
    """Products and convolutions in float32 keep all its digits inside. Also a decorator.

    cuDNN's convolutions are allowed TensorFloat-32 unless told otherwise, ten bits: then a program that is right
    differs from the model by 3e-4, as one that is wrong might. [torch's notes on CUDA, TensorFloat-32]
    """
    cudnn: Any = torch.backends.cudnn  # torch names neither to type checkers
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
