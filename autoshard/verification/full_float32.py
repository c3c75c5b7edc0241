"""float32 in full on GPUs, whatever the script allows."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Generator[None]:
    """Products and convolutions in float32 keep all its digits inside. Also a decorator.

    cuDNN's convolutions are allowed TensorFloat-32 unless told otherwise, ten bits: then a program that is right
    differs from the model by 3e-4, as one that is wrong might. [torch's notes on CUDA, TensorFloat-32]
    """
    cudnn: Any = torch.backends.cudnn  # torch names neither to type checkers
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    with _old_flag_off(cudnn):
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


@contextmanager
def _old_flag_off(cudnn: Any) -> Generator[None]:
    """A model that reads the flag from before there were precisions, as `torch.backends.cudnn.flags()` does, gets an
    error where it says another thing than these."""
    try:
        before = cudnn.allow_tf32
    except RuntimeError:  # it does so outside, too
        yield
        return
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
