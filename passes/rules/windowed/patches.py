"""Patches of a plane and back (unfold, fold): batch and channels split; space is split by the patches.

Where patches are flattened into one dim, rows before columns, rows of patches are split.
"""

from __future__ import annotations

import math

from torch import fx

from passes.layout.windows import SlidingWindow
from passes.rules.core.assemble import assemble, whole_rule
from passes.rules.core.emit_op import again, argument
from passes.rules.core.opcall import OpCall
from passes.rules.core.rule import Dim, OpRule
from passes.rules.plain.empty_results import empty_safe
from passes.rules.plain.pointwise import linear_sets
from passes.rules.windowed.windowed import Site
from passes.rules.windowed.windows_in_space import pad_space, per_dim, space_dims, space_factor, unpad_space

__all__ = ["patches", "patches_back", "windows_along", "windows_along_back"]

_SPACE = 2


@empty_safe
def patches(call: OpCall) -> OpRule:
    """im2col: ... c window(y0) window(y1) -> ... (c k) (y0 y1); k: whole"""
    return _patches(call, plane=0)


@empty_safe
def patches_back(call: OpCall) -> OpRule:
    """col2im: ... (c k) (y0 y1) -> ... c window(y0) window(y1); k: whole. What patches add to an element is summed."""
    return _patches(call, plane=1)


def _patches(call: OpCall, plane: int) -> OpRule:
    """plane: which is the plane, the operand (0) or the result (1)."""
    shape = call.shapes[plane]
    windows, counts = _geometry(call, shape)
    dims = space_dims(len(shape), _SPACE)
    channel = len(shape) - _SPACE - 1
    rows: Dim = tuple(space_factor(d) for d in range(_SPACE))
    columns = (*dims[:channel], (*dims[channel], "k"), rows)
    kernel = math.prod(per_dim(call["kernel_size"], _SPACE))
    tensors, localize = ([dims, columns], _take) if plane == 0 else ([columns, dims], _put)
    return assemble(
        call.shapes,
        tensors[:1],
        tensors[1:],
        sizes={"k": kernel, **dict(zip(rows, counts, strict=True))},
        whole=["k"],
        linear=linear_sets(call, "self"),
        windows={(plane, channel + 1 + d): window for d, window in enumerate(windows)},
        localize=lambda ctx: localize(Site(ctx, channel + 1, windows, shape[-_SPACE:], counts)),
    )


def _geometry(call: OpCall, shape: tuple[int, ...]) -> tuple[list[SlidingWindow], list[int]]:
    """Per dim of a plane of `shape` its window, and how many patches there are."""
    lists = (per_dim(call[name], _SPACE) for name in ("kernel_size", "stride", "dilation", "padding"))
    windows = [SlidingWindow(*numbers) for numbers in zip(shape[-_SPACE:], *lists, strict=True)]
    spans = [w.length + 2 * w.before - w.dilation * (w.kernel - 1) - 1 for w in windows]
    return windows, [span // w.stride + 1 for span, w in zip(spans, windows, strict=True)]


def _sides(site: Site[SlidingWindow]) -> tuple[list[tuple[int, int]], list[int]]:
    """Per dim what to pad this rank's part of a plane with, and what the op still pads itself."""
    split, windows = site.split, site.windows
    padding = [w.padding(*site.results(d)) if d in split else (0, 0) for d, w in enumerate(windows)]
    return padding, [0 if d in split else w.before for d, w in enumerate(windows)]


def _take(site: Site[SlidingWindow]) -> fx.Node:
    ctx, (sides, padding) = site.ctx, _sides(site)
    return again(ctx, self=pad_space(ctx, argument(ctx, "self"), sides), padding=padding)


def _put(site: Site[SlidingWindow]) -> fx.Node:
    ctx, (sides, padding) = site.ctx, _sides(site)
    sizes = [n + sum(side) for n, side in zip(site.input_lengths, sides, strict=True)]
    return unpad_space(ctx, again(ctx, output_size=sizes, padding=padding), sides)


@empty_safe
def windows_along(call: OpCall) -> OpRule:
    """Tensor.unfold: a window(y) b -> a y b k; k: whole"""
    source = call.tensor("self")
    if source.ndim == 0:
        return whole_rule(call.shapes, len(call.operands))
    return _along(call, source.shape, call["dimension"], plane=0)


@empty_safe
def windows_along_back(call: OpCall) -> OpRule:
    """unfold_backward: a y b k -> a window(y) b; k: whole"""
    if call.result.ndim == 0:
        return whole_rule(call.shapes, len(call.operands))
    return _along(call, call.result.shape, call["dim"], plane=1)


def _along(call: OpCall, shape: tuple[int, ...], dim: int, plane: int) -> OpRule:
    """plane: which has the dim that windows run along, the operand (0) or the result (1)."""
    dim %= len(shape)
    dims: list[Dim] = [space_dims(1, 1)[0] if d == dim else (f"d{d}",) for d in range(len(shape))]
    tensors = [dims, [*dims, ("k",)]] if plane == 0 else [[*dims, ("k",)], dims]
    return assemble(
        call.shapes,
        tensors[:1],
        tensors[1:],
        whole=["k"],
        linear=linear_sets(call, "self" if plane == 0 else "grad_in"),
        windows={(plane, dim): SlidingWindow(shape[dim], int(call["size"]), int(call["step"]))},
        localize=None if plane == 0 else lambda ctx: again(ctx, input_sizes=ctx.result_shape()),
    )
