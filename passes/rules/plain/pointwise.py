"""Pointwise ops: every dim of the result may be split; operands broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from passes.rules.core.assemble import assemble
from passes.rules.core.opcall import Builder, OpCall, TensorInfo
from passes.rules.core.rule import Dim, Localize, OpRule

__all__ = ["broadcast_dims", "linear_sets", "pointwise"]


def pointwise(*linear: str, localize: Localize | None = None) -> Builder:
    """..., ... -> ...

    linear: groups of argument names, "self other" for linear in both together; see `linear_sets`.
    """

    def build(call: OpCall) -> OpRule:
        ndim = call.result.ndim
        return assemble(
            call.shapes,
            [broadcast_dims(operand.ndim, ndim) for operand in call.operands],
            [broadcast_dims(ndim, ndim)] * len(call.results),
            linear=linear_sets(call, *linear),
            localize=localize,
        )

    return build


def broadcast_dims(ndim: int, result_ndim: int) -> tuple[Dim, ...]:
    """Dims of a tensor of `ndim`, aligned at the right with a result whose dims are d0, d1, ..."""
    return tuple((f"d{i}",) for i in range(result_ndim - ndim, result_ndim))


def linear_sets(call: OpCall, *groups: str) -> tuple[frozenset[int], ...]:
    """Operand positions of each group of argument names in which this call is linear.

    A group must be all tensors: x + 1 is not linear, for every rank would add the 1; a number that
    is 0, or an argument left out, does no harm. An argument that is a list counts with all of its
    tensors. No sums of bools, and no linearity where the result cannot hold what is summed (a float
    cast to an integer is rounded in every part).
    """
    found: list[frozenset[int]] = []
    for group in groups:
        members: list[TensorInfo] = []
        legal = True
        for name in group.split():
            value = call[name]
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, TensorInfo):
                    members.append(item)
                else:
                    legal = legal and (item is None or item == 0)
        if legal and members and _additive(members, call.results):
            found.append(frozenset(m.position for m in members))
    return tuple(found)


def _additive(members: Sequence[TensorInfo], results: Sequence[TensorInfo | None]) -> bool:
    lowest = min(_kind(r.dtype) for r in results if r is not None)
    return all(0 < _kind(m.dtype) <= lowest for m in members)


def _kind(dtype: torch.dtype) -> int:
    """bool 0, integer 1, float 2, complex 3."""
    if dtype == torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1
