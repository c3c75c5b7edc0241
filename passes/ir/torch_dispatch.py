"""Private torch APIs by which ops find their kernels: one small function each, saying what it is for.

The others are in `passes/ir/torch_compat.py`. Supported: see there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


def accelerator_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Inside, on this thread, calls of these ops run the given functions first, before autograd sees them. A function
    that calls its op again reaches torch."""
    return _kernels_first(kernels, torch._C.DispatchKey.AutocastHPU)  # type: ignore[attr-defined]


def values_asked(kernels: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """The same for ops that take values out of tensors, at the same time."""
    return _kernels_first(kernels, torch._C.DispatchKey.AutocastIPU)  # type: ignore[attr-defined]


@contextmanager
def _kernels_first(kernels: Mapping[Any, Callable[..., Any]], key: Any) -> Generator[None]:
    """key: that of an autocast which no backend in torch uses, put among the keys of every call; torch's own
    autocast keys follow a tensor's device.
    `_C._ExcludeDispatchKeyGuard` and `_IncludeDispatchKeyGuard` since torch 1.13, `Library.fallback` since torch 2.6.
    """
    own, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")

    def below(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return function(*args, **kwargs)

        return run

    try:
        others.fallback(torch.library.fallthrough_kernel, key.name)
        for op, function in kernels.items():
            own.impl(op, below(function), key.name)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        with torch._C._IncludeDispatchKeyGuard(key):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
        own._destroy()
        others._destroy()


def is_autocast_op(name: str) -> bool:
    """Whether this torch's autocast of CUDA does something at the ATen op "name" or "name.overload". Since 1.13."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


def autocast_of_cpu_ignored() -> AbstractContextManager[Any]:
    """`torch.autocast("cpu")` casts nothing inside. `_C._ExcludeDispatchKeyGuard` since torch 1.13."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
