"""Neighbourhood attention with NATTEN's names, arguments and layout, as an op that is split in space.

A model written for NATTEN changes one import: `from autoshard.neighborhood import na1d, na2d, na3d`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from cost_model.checked_arguments import reject
from cost_model.errors import ShardingError, UnsupportedOpError
from passes.ops import neighborhood_attention

T = TypeVar("T", int, bool)


def _over(space: int, about: str):  # its type is that of what it returns
    """`na1d` and so on, over so many dims."""
    name = f"na{space}d"

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] | None = False,
        scale: float | None = None,
    ) -> Tensor:
        for argument, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise reject(f"{name}: {argument}", x, "a tensor")
        if scale is not None and (not isinstance(scale, (int, float)) or abs(scale) >= 2**63):
            raise reject(f"{name}: scale", scale, "a number, or None")
        if any(n != 1 for n in _each(name, "stride", stride, space)):
            raise UnsupportedOpError(f"{name}: stride {stride} is not supported\n  try: stride=1")
        _check_tensors(name, space, query, key, value)
        kernel = _each(name, "kernel_size", kernel_size, space)
        steps = _each(name, "dilation", dilation, space)
        lengths = [int(n) for n in query.shape[1:-2]]
        _check_fits(name, lengths, kernel, steps)
        causal = _each(name, "is_causal", bool(is_causal) if is_causal is None else is_causal, space)
        key, value = (_repeat_heads(x, query.shape[-2]) for x in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        origin = [0] * space
        return neighborhood_attention(
            query, key, value, kernel, steps, causal, factor, lengths, origin, origin
        )

    attend.__name__ = attend.__qualname__ = name
    attend.__doc__ = about
    return attend


def _each(name: str, argument: str, value: T | Sequence[T], space: int) -> list[T]:
    """One number for every dim of space, or one a dim."""
    found = [value] * space if isinstance(value, int) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(n, int) and abs(n) < 2**40 for n in found):
        raise reject(f"{name}: {argument}", value, "one number, or one a dim")
    if len(found) != space:
        raise ShardingError(
            f"{name}: {argument} {value} has {len(found)} entries for {space} dims\n  try: one number, or one a dim"
        )
    return list(found)


def _check_tensors(name: str, space: int, query: Tensor, key: Tensor, value: Tensor) -> None:
    dims = "[batch, " + ", ".join("xyz"[:space]) + ", heads, head_dim]"
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if any(len(shape) != space + 3 for shape in shapes):
        raise ShardingError(
            f"{name}: query, key and value of shapes {shapes} where {dims} is wanted\n  try: permute their dims"
        )
    if len({shape[:-2] for shape in shapes}) != 1 or shapes[0][-1] != shapes[1][-1]:
        raise ShardingError(
            f"{name}: query, key and value {dims} of shapes {shapes} differ in batch, space or head_dim\n"
            "  try: the same for all but the value's head_dim"
        )
    heads, groups = shapes[0][-2], shapes[1][-2]
    if shapes[2][-2] != groups or groups == 0 or heads % groups:
        raise ShardingError(
            f"{name}: {heads} heads of query, {groups} of key and {shapes[2][-2]} of value\n"
            "  try: as many of key as of value, a divisor of the query's"
        )
    kinds = [(x.dtype, str(x.device)) for x in (query, key, value)]
    if len(set(kinds)) != 1 or not query.dtype.is_floating_point:
        raise ShardingError(
            f"{name}: query, key and value are {kinds}\n  try: one floating dtype and one device for all"
        )


def _check_fits(name: str, lengths: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> None:
    for d, (length, size, step) in enumerate(zip(lengths, kernel, dilation, strict=True)):
        if size < 1 or step < 1:
            raise ShardingError(
                f"{name}: kernel_size {size} and dilation {step} in dim {d} of space\n  try: 1 or more"
            )
        if size * step > length:
            raise ShardingError(
                f"{name}: kernel_size {size} x dilation {step} is more than the {length} positions "
                f"of dim {d} of space\n  try: a smaller kernel or dilation there, or pad the input"
            )


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[..., groups, d] -> [..., heads, d]: each head for `heads // groups` of the query's, next to each other."""
    groups = x.shape[-2]
    if groups == heads:
        return x
    sizes = (*x.shape[:-1], heads // groups, x.shape[-1])
    return x.unsqueeze(-2).expand(sizes).flatten(-3, -2)


na1d = _over(
    1,
    """Neighbourhood attention over one dim.

    query [batch, x, heads, head_dim], key of the same shape, value [batch, x, heads, head_dim_v]; returns
    [batch, x, heads, head_dim_v]. Fewer heads of key and value: each serves as many of the query's, next to each other.
    Each query attends to `kernel_size` keys, every `dilation`-th, about itself, moved inside at the edges; an even
    kernel has one more before it than after it. is_causal: itself and the `kernel_size` - 1 before it, as many as there
    are. scale: of the products; head_dim ** -0.5 if not given. Computed in at least float32.

    Raises ShardingError if shapes, dtypes or devices do not fit each other, or kernel_size * dilation is more than a
    dim has; UnsupportedOpError for a stride other than 1.
    """,
)
_MORE = "kernel_size, dilation and is_causal: one, or one a dim."
na2d = _over(2, f"`na1d` over two dims, [batch, x, y, heads, head_dim]; {_MORE}")
na3d = _over(3, f"`na1d` over three dims, [batch, x, y, z, heads, head_dim]; {_MORE}")
