"""One rank's arguments as the global call: which inputs are shards, and of what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.calls.signature import matched_placements
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec
from passes.capture.call import flatten_call, tensor_names
from passes.capture.trees import unflatten
from passes.layout.layout import Layout
from passes.layout.placements import placements_to_layout

__all__ = ["GlobalCall", "alike", "global_call", "joined"]

Shapes = Callable[[list[tuple[int, ...]]], list[list[tuple[int, ...]]]]
"""Local shapes of this rank's inputs -> those of every rank, by rank."""


@dataclass(frozen=True)
class GlobalCall:
    """args, kwargs: the call with every shard replaced by a tensor of its global shape, for tracing
    only. layouts: by tensor position, of the inputs that are shards. shapes: global, per tensor."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layouts: Mapping[int, Layout]
    shapes: tuple[tuple[int, ...], ...]


def alike(mesh: MeshSpec) -> Shapes:
    """Without ranks to ask: all hold shards of the same shape."""
    return lambda shapes: [shapes] * mesh.device_count


def global_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: MeshSpec,
    in_placements: Any,
    everyones_shapes: Shapes | None = None,
) -> GlobalCall:
    """The global call behind one rank's arguments.

    DTensors know their global shape. A plain tensor with placements is this rank's shard; the split
    sizes are those that `everyones_shapes` reports (default: all alike), equal or not. Others are
    global already.

    Raises ShardingError if placements do not fit the inputs, or the ranks' shards do not fit together.
    """
    tensors, key = flatten_call(args, kwargs)
    names = tensor_names(key)
    given = matched_placements(in_placements, names, mesh, argument="in_placements")
    local = [tuple(t.to_local().shape) if isinstance(t, DTensor) else tuple(t.shape) for t in tensors]
    shapes = (everyones_shapes or alike(mesh))(local)
    layouts: dict[int, Layout] = {}
    for position, tensor in enumerate(tensors):
        what = f"input {names[position]}"
        if isinstance(tensor, DTensor):
            layout = placements_to_layout(tensor.placements, tuple(tensor.shape), mesh, what=what)
            shape = tuple(tensor.shape)
        elif given.get(position) is not None:
            layout, shape = joined(given[position], [s[position] for s in shapes], mesh, what)
        else:
            continue
        layouts[position] = layout
        tensors[position] = _stand_in(tensor, shape)
    new_args, new_kwargs = unflatten(key.tree, tensors)
    return GlobalCall(new_args, new_kwargs, layouts, tuple(tuple(t.shape) for t in tensors))


def joined(
    placements: Any, shapes: Sequence[tuple[int, ...]], mesh: MeshSpec, what: str
) -> tuple[Layout, tuple[int, ...]]:
    """(layout, global shape) of the tensor whose shard on rank r has shape shapes[r]."""
    plain = placements_to_layout(placements, shapes[0], mesh, what=what)
    sizes: list[tuple[int, ...] | None] = []
    lengths: list[int] = []
    for dim, axes in enumerate(plain.dims):
        found: list[int | None] = [None] * mesh.size(*axes)
        for rank, shape in enumerate(shapes):
            index = mesh.linear_index(rank, axes)
            if len(shape) != len(shapes[0]) or found[index] not in (None, shape[dim]):
                raise ShardingError(
                    f"the ranks' shards of {what} do not fit together: rank {rank} has {list(shape)}, "
                    f"which disagrees with other ranks in dim {dim}\n"
                    "  try: equal sizes on all ranks that hold the same part, as `in_placements` says"
                )
            found[index] = shape[dim]
        parts = tuple(size for size in found if size is not None)
        sizes.append(parts if axes else None)
        lengths.append(sum(parts))
    return Layout.of(lengths, mesh, plain.dims, plain.partial, sizes), tuple(lengths)


def _stand_in(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the global shape for tracing; its values are never read, so it has no storage."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    stand_in = torch.empty(shape, dtype=local.dtype, device="meta")
    return stand_in.requires_grad_(tensor.requires_grad)
