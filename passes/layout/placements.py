"""Between `Layout` and torch's placements: exact both ways, axis order included; and placements as users write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from cost_model.errors import ShardingError, shown
from cost_model.mesh import MeshSpec
from passes.ir.torch_dtensor import is_strided_shard, strided_shard, strided_shard_factor
from passes.layout.layout import REDUCE_OPS, Layout


def layout_to_placements(layout: Layout, mesh: MeshSpec) -> tuple[Placement, ...]:
    """One placement per mesh axis, as `DTensor` states them.

    A dim split out of mesh order, f32[4096@tp@dp] on (dp, tp), is _StridedShard on dp with the
    number of tp shards as its split factor, as torch's FSDP of TP. Layouts with explicit sizes have
    no placements: ShardingError.
    """
    if layout.counts_rows:
        raise ShardingError(f"layout {layout} has explicit split sizes, which torch placements cannot state")
    reductions = dict(layout.partial)
    return tuple(_placement(axis, layout, reductions, mesh) for axis in mesh.names)


def _placement(axis: str, layout: Layout, reductions: dict[str, str], mesh: MeshSpec) -> Placement:
    if axis in reductions:
        return Partial(reductions[axis])
    dim = layout.dim_of(axis)
    if dim is None:
        return Replicate()
    order = layout.dims[dim]
    majors = order[: order.index(axis)]
    out_of_order = [a for a in majors if mesh.index(a) > mesh.index(axis)]
    if not out_of_order:
        return Shard(dim)
    return strided_shard(dim, mesh.size(*out_of_order))


def placements_to_layout(
    placements: Sequence[Placement], shape: Sequence[int], mesh: MeshSpec, *, what: str
) -> Layout:
    """The layout of a tensor of global `shape` that has `placements`, one per mesh axis.

    Axes of size 1 are dropped: they change nothing. `what` names the tensor in errors.
    Raises ShardingError for a wrong number of placements, a dim that does not exist, a reduction
    other than sum, max or min, or a placement of an unknown type.
    """
    if len(placements) != len(mesh.names):
        raise ShardingError(
            f"{what} has {len(placements)} placements; the mesh has {len(mesh.names)} axes {mesh.names}\n"
            f"  try: one placement per mesh axis, in the order {mesh.names}"
        )
    dims: list[list[str]] = [[] for _ in shape]
    partial: list[tuple[str, str]] = []
    for axis, placement in reversed(list(zip(mesh.names, placements, strict=True))):
        if mesh.size(axis) > 1:
            _place(axis, placement, dims, partial, shape, mesh, what)
        else:
            _checked_dim(axis, placement, shape, what)
    return Layout.of(shape, mesh, dims, partial)


def _place(
    axis: str,
    placement: Placement,
    dims: list[list[str]],
    partial: list[tuple[str, str]],
    shape: Sequence[int],
    mesh: MeshSpec,
    what: str,
) -> None:
    """Insert `axis`; axes come from the last to the first, so a plain Shard goes in front (major)."""
    if isinstance(placement, Partial):
        if placement.reduce_op not in REDUCE_OPS:
            raise ShardingError(
                f"{what} is Partial({placement.reduce_op!r}) over axis {axis!r}\n"
                f"  supported reductions are {', '.join(REDUCE_OPS)}\n  try: divide before the reduction, then sum"
            )
        partial.append((axis, placement.reduce_op))
        return
    dim = _checked_dim(axis, placement, shape, what)
    if dim is None:
        return
    position = 0
    if is_strided_shard(placement):
        factor = strided_shard_factor(placement)
        while math.prod(mesh.size(a) for a in dims[dim][:position]) < factor and position < len(dims[dim]):
            position += 1
    dims[dim].insert(position, axis)


def _checked_dim(axis: str, placement: Placement, shape: Sequence[int], what: str) -> int | None:
    if isinstance(placement, (Replicate, Partial)):
        return None
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        raise ShardingError(
            f"{what} has {placement!r} for axis {axis!r}, which is no placement\n"
            "  try: Shard(dim), Replicate() or Partial() from torch.distributed.tensor"
        )
    if not -len(shape) <= dim < len(shape):
        raise ShardingError(
            f"cannot split dim {dim} of {what} over axis {axis!r}: it has {len(shape)} dims {tuple(shape)}\n"
            f"  try: Shard(d) with 0 <= d < {len(shape)}"
            if len(shape)
            else f"cannot split dim {dim} of {what} over axis {axis!r}: it is a scalar\n  try: Replicate()"
        )
    return dim % len(shape)


Placements = tuple[Placement, ...]


def placement_leaves(given: Any, mesh: MeshSpec, *, argument: str) -> list[Placements | None]:
    """The placements in a pytree, in order; None stays. ShardingError for a leaf that is neither."""
    if is_leaf(given):
        return [as_placements(given, mesh, argument)]
    leaves = pytree.tree_leaves(given, is_leaf=lambda x: x is None or is_leaf(x))
    return [
        None if leaf is None else as_placements(leaf, mesh, f"{argument}[{i}]")
        for i, leaf in enumerate(leaves)
    ]


def is_leaf(value: Any) -> bool:
    """Whether it is a placement, or one for each mesh axis."""
    if isinstance(value, Placement):
        return True
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(v, Placement) for v in value)


def as_placements(leaf: Any, mesh: MeshSpec, argument: str) -> Placements:
    """One placement per mesh axis from a leaf; ShardingError, naming `argument`, if it is none."""
    if not is_leaf(leaf):
        raise ShardingError(
            f"{argument} is {shown(leaf)}, which is no placement\n  try: [Shard(0)] from torch.distributed.tensor"
        )
    placements = (leaf,) if isinstance(leaf, Placement) else tuple(leaf)
    if len(placements) != len(mesh.names):
        raise ShardingError(
            f"{argument} has {len(placements)} placements; the mesh has {len(mesh.names)} axes {mesh.names}\n"
            "  try: one placement per mesh axis"
        )
    return placements
