"""Pooling, resizing and padding of planes: batch and channels split, the plane is whole."""

from __future__ import annotations

from torch import fx

from passes.rules.emit import again, constant
from passes.rules.opcall import Builder
from passes.rules.rule import LocalContext
from passes.rules.spec import spec

__all__ = ["planes"]


def planes(text: str, size: str | None = None) -> Builder:
    """A rule in which h w and y x are whole. `size`: the argument that holds the result's shape."""
    whole = "".join(f"; {factor}: whole" for factor in "hwyx" if factor in text.split(";")[0])

    def localize(ctx: LocalContext) -> fx.Node | tuple[fx.Node | None, ...]:
        if 0 in ctx.result_shape():  # these ops refuse tensors without channels
            value = ctx.node.meta["val"]
            return tuple(constant(ctx, 0, i) for i in range(len(value))) if _several(value) else constant(ctx, 0)
        return again(ctx) if size is None else again(ctx, **{size: ctx.result_shape()})

    return spec(text + whole, localize)


def _several(value: object) -> bool:
    return isinstance(value, (tuple, list))
