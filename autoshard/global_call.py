"""One rank's arguments as the global call, of which some inputs are shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from cost_model.errors import ShardingError, type_of
from cost_model.mesh import MeshSpec
from passes.capture.call import CallKey, flatten_call, tensor_names
from passes.capture.trees import unflatten
from passes.layout.layout import Layout
from passes.layout.placements import (
    Placements,
    as_placements,
    is_leaf,
    placement_leaves,
    placements_to_layout,
)


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) from `example_inputs`: a tuple of arguments, (tuple, dict), a dict, or one tensor.

    Raises ShardingError for anything else.
    """
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        if len(example_inputs) == 2 and isinstance(example_inputs[0], (tuple, list)):
            args, kwargs = example_inputs
            if isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs):
                return tuple(args), dict(kwargs)
        return tuple(example_inputs), {}
    raise ShardingError(
        f"example_inputs is {type_of(example_inputs)}\n"
        "  try: a tuple of the call's arguments, or (tuple, dict) with keyword arguments"
    )


def matched_placements(
    given: Any, names: Sequence[str], mesh: MeshSpec, *, argument: str
) -> dict[int, Placements | None]:
    """Placements by tensor position from a pytree; None leaves are dropped.

    `given` is one leaf for all tensors, a {name: leaf} dict, or a nest of leaves with one per
    tensor in order. A leaf is a Placement (on a mesh of one axis) or one Placement per mesh axis.
    Raises ShardingError, naming `argument`, when the counts or names do not match.
    """
    if given is None:
        return {}
    if is_leaf(given):
        leaf = as_placements(given, mesh, argument)
        return dict.fromkeys(range(len(names)), leaf)
    if isinstance(given, Mapping):
        return _by_name(given, names, mesh, argument)
    leaves = placement_leaves(given, mesh, argument=argument)
    if len(leaves) != len(names):
        raise ShardingError(
            f"{argument} has {len(leaves)} entries for {len(names)} tensors ({', '.join(names)})\n"
            f"  try: one tuple of {len(mesh.names)} placements per tensor, or None for a global one"
        )
    return {i: leaf for i, leaf in enumerate(leaves) if leaf is not None}


def _by_name(
    given: Mapping[Any, Any], names: Sequence[str], mesh: MeshSpec, argument: str
) -> dict[int, Placements | None]:
    """A key names a tensor, or an argument with tensors inside: its value has one leaf for all, or one for each."""
    found: dict[int, Placements | None] = {}
    for key, value in given.items():
        inside = [i for i, name in enumerate(names) if name == key or _is_inside(name, key)]
        if not inside:
            raise ShardingError(
                f"{argument} names {key!r}, which is no tensor of the call\n"
                f"  try: one of {', '.join(map(repr, names))}"
            )
        part = [names[i] for i in inside]
        inner = matched_placements(value, part, mesh, argument=f"{argument}[{key!r}]")
        found.update({inside[i]: leaf for i, leaf in inner.items()})
    return found


def _is_inside(name: str, argument: object) -> bool:
    return isinstance(argument, str) and name.startswith((f"{argument}[", f"{argument}."))


def leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], list[torch.Tensor]]:
    """(names, tensors) of a batch, in pytree order of (args, kwargs), a tensor as often as it appears.

    A name is readable: "input_ids" for a keyword, "args[0]" for a positional argument, with what is
    inside a structure behind it.
    """
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs))
    found = [(path, leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [_readable(path) for path, _ in found], [leaf for _, leaf in found]


def _readable(path: Sequence[Any]) -> str:
    """(1, "x", 0) -> "x[0]"; (0, 1) -> "args[1]"."""
    where, *rest = path
    if str(where) == "[1]":
        key, *rest = rest
        return str(getattr(key, "key", key)) + "".join(map(str, rest))
    return "args" + "".join(map(str, rest))


Shapes = Callable[[list[tuple[int, ...]]], list[list[tuple[int, ...]]]]
"""Local shapes of this rank's inputs -> those of every rank, by rank."""


@dataclass(frozen=True)
class GlobalCall:
    """args, kwargs: the call with every shard replaced by a tensor of its global shape, for tracing
    only. layouts: by tensor position, of the inputs that are shards. shapes: global, per tensor. dtensors: which inputs
    are some."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layouts: Mapping[int, Layout]
    shapes: tuple[tuple[int, ...], ...]
    dtensors: frozenset[int] = frozenset()


def alike(mesh: MeshSpec) -> Shapes:
    """Without ranks to ask: all hold shards of the same shape."""
    return lambda shapes: [shapes] * mesh.device_count


def global_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: MeshSpec,
    in_placements: Any,
    everyones_shapes: Shapes | None = None,
    batch_axes: Sequence[str] = (),
) -> GlobalCall:
    """The global call behind one rank's arguments.

    batch_axes: mesh axes along which each rank passes its own part of the batch (`batch="per_rank"`): of every plain
    tensor that has as many rows as the call's first one, on all ranks, and no placements of its own.

    DTensors know their global shape. A plain tensor with placements is this rank's shard; the split
    sizes are those that `everyones_shapes` reports (default: all alike), equal or not. Others are
    global already. How parts lie in memory may differ between ranks: of a call with parts every tensor counts as
    contiguous (`counts_as_in_order`).

    Raises ShardingError if placements do not fit the inputs, or the ranks' shards do not fit together.
    """
    tensors, key = flatten_call(args, kwargs)
    names = tensor_names(key)
    given = matched_placements(in_placements, names, mesh, argument="in_placements")
    local = [tuple(t.to_local().shape) if isinstance(t, DTensor) else tuple(t.shape) for t in tensors]
    shapes = (everyones_shapes or alike(mesh))(local)
    if batch_axes:
        rows = tuple(Shard(0) if axis in batch_axes else Replicate() for axis in mesh.names)
        given = dict.fromkeys(_of_the_batch(shapes), rows) | given
    layouts: dict[int, Layout] = {}
    dtensors = frozenset(i for i, tensor in enumerate(tensors) if isinstance(tensor, DTensor))
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
    if counts_as_in_order(key, in_placements, batch_axes):
        tensors = [in_order(tensor) for tensor in tensors]
    new_args, new_kwargs = unflatten(key.tree, tensors)
    return GlobalCall(new_args, new_kwargs, layouts, tuple(tuple(t.shape) for t in tensors), dtensors)


def counts_as_in_order(key: CallKey, in_placements: Any, batch_axes: Sequence[str]) -> bool:
    """Whether some tensors of a call are, or may be, a rank's parts. The last two as of `global_call`."""
    return bool(batch_axes) or in_placements is not None or key.has_dtensors


def axes_of_batch(batch: str, mesh: MeshSpec, stages: str | None) -> tuple[str, ...]:
    """Along which ranks pass parts of the batch of their own; those along stages pass the same."""
    return tuple(axis for axis in mesh.names if axis != stages) if batch == "per_rank" else ()


def _of_the_batch(shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """Positions of the tensors that, on every rank, have as many rows as that rank's first tensor with dims."""
    ranked = [position for position, shape in enumerate(shapes[0]) if shape]
    return [one for one in ranked if all(s[one][:1] == s[ranked[0]][:1] for s in shapes)]


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
    stand_in = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return stand_in.requires_grad_(tensor.requires_grad)


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, as parts count."""
    if tensor.is_contiguous():
        return tensor
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)
