"""Reflected and replicated padding: space is split by its results, which are positions of the input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from passes.layout.windows import EdgePad
from passes.rules.core.emit_op import argument, aten, positions
from passes.rules.core.opcall import OpCall
from passes.rules.windowed.taps import Taps, mixed, mixed_back
from passes.rules.windowed.windowed import Site, windowed

__all__ = ["edge_pad", "edge_pad_backward"]


def _pads(call: OpCall, lengths: Sequence[int], counts: Sequence[int]) -> list[EdgePad]:
    """The op's padding is (before, after) of the last dim first."""
    before, reflects = call["padding"][::2][::-1], "reflection" in str(call.target)
    return [EdgePad(n, int(b), reflects) for n, b in zip(lengths, before, strict=True)]


def _taps(site: Site[EdgePad], dim: int) -> Taps:
    """The position in this rank's input of each of its results."""
    ctx, pad = site.ctx, site.windows[dim]
    lo, hi = site.results(dim)
    at = positions(ctx, lo - pad.before, hi - pad.before)
    if pad.reflects:
        at = ctx.call(aten.rsub.Scalar, ctx.call(aten.abs.default, at), pad.length - 1)
        at = ctx.call(aten.rsub.Scalar, ctx.call(aten.abs.default, at), pad.length - 1)
    else:
        at = ctx.call(aten.clamp.default, at, 0, pad.length - 1)
    first = site.reads(dim)[0]
    return Taps(hi - lo, 1, ctx.call(aten.sub.Tensor, at, first) if first else at)


def _localize(site: Site[EdgePad]) -> fx.Node:
    return mixed(site, argument(site.ctx, "self"), lambda d: _taps(site, d))


def _localize_backward(site: Site[EdgePad]) -> fx.Node:
    return mixed_back(site, argument(site.ctx, "grad_output"), lambda d: _taps(site, d))


# ... *window(y) -> ... *y
edge_pad = windowed("x", "y", _pads, _localize, linear="self")
# ... *y, ... *window(y) -> ... *window(y)
edge_pad_backward = windowed("yx", "x", _pads, _localize_backward, linear="grad_output")
