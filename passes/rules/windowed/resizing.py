"""Resizing by nearest neighbour, linear and cubic interpolation, antialiased or not: space is split by its results.

A rank computes where its results lie in the whole input, and picks or mixes what it has read of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from passes.layout.windows import AntialiasResize, CubicResize, LinearResize, NearestResize
from passes.rules.core.emit_op import again
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import LocalContext
from passes.rules.windowed.interpolation import Resizing, resized_taps
from passes.rules.windowed.taps import mixed, mixed_back
from passes.rules.windowed.windowed import Site, windowed

__all__ = ["resize", "resize_backward"]


def _forward_windows(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[Resizing]:
    return _resizings(call, lengths, counts, _is_precise(call.result.dtype, counts))


def _backward_windows(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[Resizing]:
    return _resizings(call, lengths, counts, False)


def _resizings(call: OpCall, lengths: Sequence[int], counts: Sequence[int], precise: bool) -> list[Resizing]:
    """One per dim of space, from the op's name and its arguments. precise: see `NearestResize`."""
    name = str(call.target)
    # Results per operand position that the caller named; None: the quotient of the sizes counts.
    names = ("scales",) if len(lengths) == 1 else ("scales_d", "scales_h", "scales_w")[-len(lengths) :]
    each = zip(lengths, counts, (call[scale] for scale in names), strict=True)
    if "align_corners" not in call.arguments:
        offset = 0.5 if "nearest_exact" in name else 0.0
        return [NearestResize(n, _nearest_ratio(n, m, scale), precise, offset) for n, m, scale in each]
    corners = bool(call["align_corners"])
    ratios = [(n, _ratio(n, m, scale, corners)) for n, m, scale in each]
    if "_aa" in name:
        return [AntialiasResize(n, ratio, 2 if "cubic" in name else 1) for n, ratio in ratios]
    make = CubicResize if "cubic" in name else LinearResize
    return [make(n, ratio, corners) for n, ratio in ratios]


def _is_precise(dtype: torch.dtype, results: Sequence[int]) -> bool:
    """Whether the forward multiplies in float64; of small planes it does not.   [torch 2.13: UpSampleKernel.cpp]"""
    return dtype == torch.float64 and not (len(results) == 2 and sum(results) <= 128)


def _nearest_ratio(length: int, results: int, scale: float | None) -> float:
    return 1.0 / scale if scale else length / results


def _ratio(length: int, results: int, scale: float | None, align_corners: bool) -> float:
    """[torch: area_pixel_compute_scale]"""
    if length == results:
        return 1.0
    if align_corners:
        return (length - 1) / (results - 1) if results > 1 else 0.0
    return _nearest_ratio(length, results, scale)


def _localize(site: Site[Resizing]) -> fx.Node:
    return mixed(site, site.ctx.args[0], lambda d: resized_taps(site, d))


def _localize_backward(site: Site[Resizing]) -> fx.Node:
    return mixed_back(site, site.ctx.args[0], lambda d: resized_taps(site, d))


def _unsplit_backward(ctx: LocalContext) -> fx.Node:
    return again(ctx, input_size=ctx.result_shape())


# ... *window(y) -> ... *y
resize = windowed("x", "y", _forward_windows, _localize, linear="self")
# ... *y -> ... *window(y)
resize_backward = windowed(
    "y", "x", _backward_windows, _localize_backward, linear="grad_output", unsplit=_unsplit_backward
)
