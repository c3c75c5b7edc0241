"""`halo_exchange`: the rows around a rank's own, for code that is parallel by hand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import passes.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers autoshard::halo_exchange)
from cost_model.checked_arguments import checked_count, reject, shown
from cost_model.errors import ShardingError
from passes.layout.layout import chunk_sizes


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
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
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
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in value)


def _spans(parts: Sequence[int], reach: tuple[int, int], wraps: bool) -> list[tuple[int, int]]:
    """The span that each rank is to hold: nothing around an empty part, as no window reads there."""
    before, after = reach
    length = sum(parts)
    low, high = (-before, length + after) if wraps else (0, length)
    ends = zip(parts, accumulate(parts), strict=True)
    return [(max(low, end - size - before), min(high, end + after)) if size else (0, 0) for size, end in ends]
