"""Functional collectives that carry the name of what they serve, so that a profiler can show it.

    %g: f32[64, 16] = _c10d_functional.all_gather_into_tensor(%w, 4, group)
    ->
    %g: f32[64, 16] = autoshard_c10d_functional.all_gather_into_tensor(%w, 4, group, "layers.0.w.weight")

The kernel runs the plain collective; while a profiler records, inside a range of that name. As the name
is an argument of the op, it survives every compiler. The result is waited for by
`_c10d_functional.wait_tensor`, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from passes.ir.torch_compat import is_profiling
from passes.ops import quick_collectives

__all__ = ["ALL_REDUCE_IN_PLACE", "NAMED", "NAMED_BY_NAME", "NAMESPACE"]

# Inductor knows a collective's kernel by "_c10d_functional" in the op's name.
NAMESPACE = "autoshard_c10d_functional"

_SCHEMAS = {
    "all_reduce": "(Tensor input, str reduce_op, str group_name, str serves) -> Tensor",
    "all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name, str serves) -> Tensor(a!)",
    "all_gather_into_tensor": "(Tensor input, int group_size, str group_name, str serves) -> Tensor",
    "reduce_scatter_tensor": (
        "(Tensor input, str reduce_op, int group_size, str group_name, str serves) -> Tensor"
    ),
    "all_to_all_single": (
        "(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name, str serves)"
        " -> Tensor"
    ),
}


def _plain(name: str) -> Any:
    return getattr(torch.ops._c10d_functional, name).default


_RUN: Mapping[str, Callable[..., Tensor]] = {
    "all_gather_into_tensor": quick_collectives.all_gather,
    "all_reduce": quick_collectives.all_reduce,
    "all_reduce_": quick_collectives.all_reduce_,
    "all_to_all_single": quick_collectives.all_to_all,
    "reduce_scatter_tensor": quick_collectives.reduce_scatter,
}
"""What runs instead of the plain functional collective."""


def _kernel(name: str) -> Callable[..., Any]:
    plain = _RUN.get(name) or _plain(name)
    label = name.removesuffix("_")

    def run(*arguments: Any) -> Any:
        *rest, serves = arguments
        if not is_profiling():
            return plain(*rest)
        with record_function(f"{label}: {serves}"):
            return plain(*rest)

    return run


def _fake(name: str) -> Callable[..., Any]:
    plain = _plain(name)
    return lambda *arguments: plain(*arguments[:-1])


for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema)
    torch.library.impl(f"{NAMESPACE}::{_name}", "CompositeExplicitAutograd", _kernel(_name))
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake(_name))

NAMED_BY_NAME: Mapping[str, Any] = {
    name: getattr(getattr(torch.ops, NAMESPACE), name).default for name in _SCHEMAS if name[-1] != "_"
}
"""Name of a plain functional collective -> the same op with one more argument, the name it serves."""

NAMED: Mapping[Any, Any] = {_plain(name): op for name, op in NAMED_BY_NAME.items()}
"""The same by the plain op."""

ALL_REDUCE_IN_PLACE: Any = getattr(torch.ops, NAMESPACE).all_reduce_.default
