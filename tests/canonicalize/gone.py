"""Ops that no canonical graph holds, found from what takes them apart: capture's table, torch itself and the passes."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from passes.canonicalize.normalize_arguments import VIEWS
from passes.canonicalize.permutes import EQUATIONS
from passes.canonicalize.random_to_uniform import FILLS, RANGES
from passes.canonicalize.remove_noops import ALIASES, WRITTEN
from passes.capture.trace import decomposition_table

__all__ = ["is_gone"]

aten = torch.ops.aten

_REWRITTEN = {*EQUATIONS, *VIEWS, *FILLS, *RANGES, *ALIASES, *WRITTEN, aten.native_dropout_backward.default}
_LEFT = {
    aten.reshape.default,
    aten.full.default,
    aten.arange.start_step,
    aten.conj_physical.default,
    aten.clone.default,  # the graph may return one
}
"""What the passes write instead."""

_TABLE = decomposition_table()


def is_gone(op: Any) -> bool:
    return op not in _LEFT and (op in _REWRITTEN or _always_taken_apart(op) or _written_by_torch(op))


def _always_taken_apart(op: Any) -> bool:
    """By capture. A decomposition that may return NotImplemented leaves some calls as they are."""
    function = _TABLE.get(op)
    return function is not None and "NotImplemented" not in inspect.unwrap(function).__code__.co_names


def _written_by_torch(op: Any) -> bool:
    """In other ops, for every device: such an op is not seen by a tracer."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    key = op.name()
    return has_kernel(key, "CompositeImplicitAutograd") and not has_kernel(key, "CPU")
