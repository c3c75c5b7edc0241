"""Neighbourhoods in space. `halo_exchange`: the rows around a rank's own, for code that is parallel by hand; and
neighbourhood attention with NATTEN's names, arguments and layout, as an op that is split in space.

A model written for NATTEN changes one import: `from autoshard.neighborhood import na1d, na2d, na3d`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import passes.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::halo_exchange)
from cost_model.errors import ShardingError, UnsupportedOpError, checked_count, is_whole, reject, shown
from passes.layout.layout import chunk_sizes
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


def halo_exchange(
    x: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup,
    halo: Mapping[int, tuple[int, int]],
    *,
    sizes: Mapping[int, int | Sequence[int]] | None = None,
    periodic: Collection[int] = (),
) -> Tensor:
    """This rank's part of a tensor that is split in space, with the rows before and after it that others hold.

    Call it on every rank with the same arguments but x. The gradient is the transpose: what other ranks' losses say
    about a row is added up where the row is held. Works under torch.compile.

    x:        the part; the same size on all ranks in every dim but those of `halo`.
    mesh:     one axis for each dim of `halo`, in the same order; or a process group for one dim.
    halo:     {dim: (before, after)}, rows; of any number, from as many ranks as hold them.
    sizes:    {dim: length of the whole dim} if it is split as torch.chunk and DTensor do, or {dim: rows of each rank}
              along the dim's axis, 0 among them. Without an entry every rank holds as many rows as this one.
    periodic: the dims that wrap around. In others the halo ends where the dim does: the first rank has
              nothing before its part, the last nothing after it, and there is nothing to pad it with here.

    A rank without rows in a dim gets none. Dims are exchanged one after the other, the second with what the first has
    brought, so that corners arrive too.

    Raises ShardingError for arguments that do not fit, before anything is sent; all but x's shape is the
    same on all ranks, so all of them raise.
    """
    _check_kinds(x, mesh, halo, sizes, periodic)
    groups = _groups(mesh, len(halo))
    _check_device(x, mesh)
    dims = {_dim(x, dim, "halo"): reach for dim, reach in halo.items()}
    given = {_dim(x, dim, "sizes"): size for dim, size in (sizes or {}).items()}
    wrapping = {_dim(x, dim, "periodic") for dim in periodic}
    _check_dims(dims, halo, given, wrapping)
    for (dim, reach), group in zip(dims.items(), groups, strict=True):
        _check_reach(dim, reach)
        parts = _parts(given.get(dim), x.shape[dim], dim, group.size())
        spans = _spans(parts, reach, dim in wrapping)
        x = torch.ops.autoshard.halo_exchange(
            x, dim, parts, list(chain(*spans)), dim in wrapping, group.rank(), group.group_name
        )
    return x


def _check_kinds(x: object, mesh: object, halo: object, sizes: object, periodic: object) -> None:
    if torch.compiler.is_compiling():  # a traced mesh is a stand-in of torch's
        return
    if not isinstance(x, Tensor):
        raise reject("halo_exchange: x", x, "this rank's part, a tensor")
    if not isinstance(mesh, (DeviceMesh, dist.ProcessGroup)):
        raise reject("halo_exchange: mesh", mesh, "a DeviceMesh with one axis for each dim of halo")
    for argument, value in (("halo", halo), ("sizes", {} if sizes is None else sizes)):
        if not isinstance(value, Mapping):
            raise reject(f"halo_exchange: {argument}", value, "{dim: ...}, such as halo={2: (1, 1)}")
    if isinstance(periodic, str) or not isinstance(periodic, Collection):
        raise reject("halo_exchange: periodic", periodic, "the dims that wrap around, such as (2,)")


def _groups(mesh: DeviceMesh | dist.ProcessGroup, count: int) -> list[dist.ProcessGroup]:
    """One process group for each of `count` dims."""
    if not count:
        raise ShardingError("halo_exchange: halo names no dim\n  try: halo={2: (1, 1)}")
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)] if isinstance(mesh, DeviceMesh) else [mesh]
    if len(groups) != count:
        what = f"a mesh of {len(groups)} axes" if isinstance(mesh, DeviceMesh) else "one process group"
        raise ShardingError(
            f"halo_exchange: {what} for the {count} dims of halo; each dim is split over one axis\n"
            "  try: a part of the mesh, mesh['h', 'w'], with its axes in the order of halo's dims"
        )
    return groups


def _check_device(x: Tensor, mesh: DeviceMesh | dist.ProcessGroup) -> None:
    if isinstance(mesh, DeviceMesh) and x.device.type != mesh.device_type:
        raise ShardingError(
            f"halo_exchange: x is on {x.device}, and the mesh is one of {mesh.device_type} devices\n"
            f"  try: x.to({mesh.device_type!r})"
        )


def _dim(x: Tensor, dim: int, argument: str) -> int:
    if not is_whole(dim) or not -x.ndim <= dim < x.ndim:
        raise ShardingError(
            f"halo_exchange: {argument} names dim {shown(dim)}, but x has {x.ndim} dims\n"
            f"  try: an integer from {-x.ndim} to {x.ndim - 1}"
        )
    return dim % x.ndim


def _check_dims(
    dims: Collection[int], halo: Collection[int], sizes: Collection[int], periodic: Collection[int]
) -> None:
    if len(dims) < len(halo):
        raise ShardingError(
            f"halo_exchange: halo names a dim twice: {list(halo)}\n  try: each dim once, counted from 0"
        )
    for argument, named in {"sizes": sizes, "periodic": periodic}.items():
        if unknown := [dim for dim in named if dim not in dims]:
            raise ShardingError(
                f"halo_exchange: {argument} names dim {unknown[0]}, of which no halo is exchanged\n"
                f"  try: leave it out, or halo={{{unknown[0]}: (0, 0)}}"
            )


def _check_reach(dim: int, reach: Sequence[int]) -> None:
    if not _is_numbers(reach) or len(reach) != 2:
        raise ShardingError(
            f"halo_exchange: the halo of dim {dim} is {shown(reach)}\n"
            "  try: (before, after), two numbers of rows, at least 0"
        )


def _parts(given: int | Sequence[int] | None, mine: int, dim: int, ranks: int) -> list[int]:
    """Rows of each rank of the dim's group."""
    if given is None:
        return [mine] * ranks
    if isinstance(given, int):
        return list(chunk_sizes(checked_count(given, f"halo_exchange: sizes[{dim}]"), ranks))
    if not _is_numbers(given):
        raise reject(
            f"halo_exchange: sizes[{dim}]", given, "the length of the dim, or a list of each rank's rows"
        )
    if len(given) != ranks:
        raise ShardingError(
            f"halo_exchange: {len(given)} sizes of dim {dim} for a group of {ranks} ranks\n"
            "  try: one for each rank, 0 where it holds nothing"
        )
    return list(given)


def _is_numbers(value: object) -> bool:
    """Whether it is a list of integers, none negative."""
    return isinstance(value, (list, tuple)) and all(is_whole(n) and 0 <= n < 2**40 for n in value)


def _spans(parts: Sequence[int], reach: tuple[int, int], wraps: bool) -> list[tuple[int, int]]:
    """The span that each rank is to hold: nothing around an empty part, as no window reads there."""
    before, after = reach
    length = sum(parts)
    low, high = (-before, length + after) if wraps else (0, length)
    ends = zip(parts, accumulate(parts), strict=True)
    return [(max(low, end - size - before), min(high, end + after)) if size else (0, 0) for size, end in ends]
