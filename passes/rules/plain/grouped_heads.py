"""Attention of which ranks have heads of queries [lo, hi), whatever groups they are of, and all heads of keys.

A rank takes the heads of keys that its queries see. Where it has more heads of queries of one group than of another, it
writes them out, each as often as a query sees it. Gradients of keys are its summands, and zero for the other heads.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from passes.ir.joint import node_value
from passes.ir.op_schema import schema_arguments
from passes.rules.core.emit_op import again, aten, global_tensor
from passes.rules.core.rule import LocalContext, Localize, Ring

HEADS = 1
"""The dim of heads."""


def within_groups(localize: Localize | None) -> Localize:
    """`localize`, or the op itself, of the heads of keys that a rank's part of factor `h` sees."""

    def localized(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
        local = _SeenKeys.of(ctx)
        made = again(local) if localize is None else localize(local)
        count = len(ctx.node.meta["val"])
        each = (
            made if isinstance(made, tuple) else [ctx.call(operator.getitem, made, i) for i in range(count)]
        )
        return tuple(
            local.whole(x, i) if x is not None and local.is_of_keys(i) else x for i, x in enumerate(each)
        )

    return localized


@dataclass(frozen=True)
class _SeenKeys(LocalContext):
    """`LocalContext` with the keys and values that are seen. first: head of them; counts: heads of queries that see
    each."""

    ctx: LocalContext
    first: int
    counts: tuple[int, ...]
    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(ctx: LocalContext) -> _SeenKeys:
        heads, groups = (global_tensor(ctx, name).shape[HEADS] for name in "qk")
        (lo, hi), each = ctx.interval("h"), heads // groups
        first, last = (lo // each, -(-hi // each)) if lo < hi else (0, 0)
        counts = tuple(min(hi, (g + 1) * each) - max(lo, g * each) for g in range(first, last))
        here = _SeenKeys(ctx, first, counts, ctx.node, ctx.args, ctx.kwargs)
        names = [argument.name for argument in schema_arguments(ctx.node.target)]
        args = [here.taken(x) if name in ("k", "v") else x for name, x in zip(names, ctx.args, strict=False)]
        return replace(here, args=tuple(args))

    @property
    def ring(self) -> Ring | None:
        return self.ctx.ring

    def interval(self, factor: str) -> tuple[int, int]:
        return self.ctx.interval(factor)

    def is_split(self, factor: str) -> bool:
        return self.ctx.is_split(factor)

    def result_shape(self, index: int = 0) -> list[int]:
        shape = self.ctx.result_shape(index)
        if self.is_of_keys(index):
            shape[HEADS] = len(self.counts) if self._is_even else sum(self.counts)
        return shape

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.ctx.call(target, *args, **kwargs)

    def is_of_keys(self, index: int) -> bool:
        """Whether result `index` is a gradient of keys or values."""
        return len(self.node.meta["val"]) == 3 and index > 0

    @property
    def _is_even(self) -> bool:
        """Whether all are seen by as many heads, which the op itself takes."""
        return len(set(self.counts)) < 2

    def taken(self, x: fx.Node) -> fx.Node:
        """Of keys or values, with a head for each of queries where groups are not even."""
        seen = self._heads(x, self.first, self.first + len(self.counts))
        if self._is_even:
            return seen
        shape = list(node_value(x).shape)
        wide = lambda i, count: self.call(
            aten.expand.default, self._heads(seen, i, i + 1), [*shape[:HEADS], count, *shape[HEADS + 1 :]]
        )
        return self.call(aten.cat.default, [wide(i, count) for i, count in enumerate(self.counts)], HEADS)

    def whole(self, grad: fx.Node, index: int) -> fx.Node:
        """The inverse, of gradients."""
        if not self._is_even:
            places = itertools.pairwise(itertools.accumulate(self.counts, initial=0))
            parts = [self._heads(grad, *place) for place in places]
            grad = self.call(
                aten.cat.default, [self.call(aten.sum.dim_IntList, x, [HEADS], True) for x in parts], HEADS
            )
        groups = self.ctx.result_shape(index)[HEADS]
        before, after = self.first, groups - self.first - len(self.counts)
        pads = [0, 0] * (node_value(grad).ndim - HEADS - 1)
        return (
            self.call(aten.constant_pad_nd.default, grad, [*pads, before, after], 0)
            if before or after
            else grad
        )

    def _heads(self, x: fx.Node, lo: int, hi: int) -> fx.Node:
        whole = (lo, hi) == (0, node_value(x).shape[HEADS])
        return x if whole else self.call(aten.slice.Tensor, x, HEADS, lo, hi)
