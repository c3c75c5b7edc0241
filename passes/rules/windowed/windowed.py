"""Rules of ops whose tensors are all of the input's shape, seen through windows, or of the output's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from passes.layout.windows import Window
from passes.rules.core.assemble import assemble
from passes.rules.core.opcall import Builder, OpCall
from passes.rules.core.rule import Localize, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.windows_in_space import space_dims

__all__ = ["pooling"]


def pooling(
    space: int,
    operands: str,
    results: str,
    windows_of: Callable[[OpCall, int], Sequence[Window]],
    localize: Localize,
    linear: str | None = None,
) -> Builder:
    """x: a tensor of the input's shape, seen through windows; y: one of the output's. The last `space` dims pool.

    windows_of: (call, space) -> one window per dim of space. The input is the op's argument `self`.
    """

    @empty_safe
    def build(call: OpCall) -> OpRule:
        ndim = call.tensor("self").ndim
        lead = ndim - space
        dims = space_dims(ndim, space)
        windows = windows_of(call, space)
        seen = [t for t, kind in enumerate(operands + results) if kind == "x"]
        return assemble(
            call.shapes,
            [dims] * len(operands),
            [dims] * len(results),
            linear=() if linear is None else linear_sets(call, linear),
            windows={(t, lead + d): window for t in seen for d, window in enumerate(windows)},
            localize=localize,
        )

    return build
