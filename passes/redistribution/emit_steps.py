"""Emitting plain ATen nodes and functional collectives, every one with its meta and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.ir.fake_calls import FakeCalls

__all__ = ["COLLECTIVES", "Emitter", "value"]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

COLLECTIVES = (
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
    c10d.all_to_all_single.default,
)


def value(node: fx.Node) -> torch.Tensor:
    """The node's fake (or meta) tensor: this rank's shape, strides and dtype."""
    return node.meta["val"]


@dataclass(frozen=True)
class Emitter:
    """Appends nodes at the graph's insertion point. meta: copied to each, then "val" is set, by `calls`.

    The helpers emit nothing where nothing is to be done.
    """

    graph: fx.Graph
    meta: Mapping[str, Any]
    calls: FakeCalls = field(default_factory=FakeCalls)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.named(target, self.calls(target, args, kwargs), args, kwargs)

    def named(self, target: Any, result: torch.Tensor, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta.update(self.meta)
        node.meta["val"] = result
        return node

    def collective(self, target: Any, x: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """`target(x, *args)` and the wait for it; `shape`: of the result.

        Booleans travel as bytes: no backend reduces them, and not every one gathers them. Complex numbers travel
        as pairs of real ones, a last dim: not every backend sends them (gloo: all-to-all).
        """
        if value(x).dtype == torch.bool:
            sent = self.call(aten._to_copy.default, x, dtype=torch.uint8)
            received = self.collective(target, sent, shape, *args)
            return self.call(aten._to_copy.default, received, dtype=torch.bool)
        if value(x).is_complex():
            return self._complex_collective(target, x, shape, *args)
        x = self.contiguous(x)
        result = value(x).new_empty(tuple(shape))
        started = self.named(target, result, (x, *args), {})
        return self.named(c10d.wait_tensor.default, result, (started,), {})

    def _complex_collective(self, target: Any, x: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """An input may be a conjugate that torch has only noted, which has no real view until it is computed."""
        x = self.call(aten.resolve_conj.default, self.contiguous(x))
        sent = self.call(aten.view_as_real.default, x)
        received = self.collective(target, sent, (*shape, 2), *args)
        # In a bucket it may come to lie at an odd offset, where a pair is no complex number.
        pairs = self.call(aten.clone.default, received, memory_format=torch.contiguous_format)
        return self.call(aten.view_as_complex.default, pairs)

    def contiguous(self, x: fx.Node) -> fx.Node:
        if value(x).is_contiguous():
            return x
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """Legal where `x` is contiguous, or where `shape` only splits dims of it."""
        if tuple(value(x).shape) == tuple(shape):
            return x
        return self.call(aten.view.default, x, list(shape))

    def permute(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return x
        return self.call(aten.permute.default, x, list(order))

    def slice(self, x: fx.Node, dim: int, lo: int, hi: int) -> fx.Node:
        if (lo, hi) == (0, value(x).shape[dim]):
            return x
        return self.call(aten.slice.Tensor, x, dim, lo, hi)

    def pad(self, x: fx.Node, dim: int, length: int) -> fx.Node:
        """Zeros at the end of `dim`, up to `length`."""
        missing = length - value(x).shape[dim]
        if missing == 0:
            return x
        sides = [0, 0] * (value(x).ndim - 1 - dim) + [0, missing]
        return self.call(aten.constant_pad_nd.default, x, sides, 0)

    def cat(self, pieces: Sequence[fx.Node], dim: int) -> fx.Node:
        return pieces[0] if len(pieces) == 1 else self.call(aten.cat.default, list(pieces), dim)

    def empty(self, like: fx.Node, shape: Sequence[int]) -> fx.Node:
        """A tensor of no elements: what a group exchanges nothing for."""
        return self.call(aten.new_zeros.default, like, list(shape))
