"""The user's example inputs and placements, matched to the flattened tensors of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement
from torch.utils import _pytree as pytree

from cost_model.checked_arguments import shown
from cost_model.errors import ShardingError
from cost_model.mesh import MeshSpec

__all__ = ["as_call", "as_placements", "leaf_names", "matched_placements", "placement_leaves"]

Placements = tuple[Placement, ...]


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
        f"example_inputs is a {type(example_inputs).__name__}\n"
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
    if _is_leaf(given):
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


def placement_leaves(given: Any, mesh: MeshSpec, *, argument: str) -> list[Placements | None]:
    """The placements in a pytree, in order; None stays. ShardingError for a leaf that is neither."""
    if _is_leaf(given):
        return [as_placements(given, mesh, argument)]
    leaves = pytree.tree_leaves(given, is_leaf=lambda x: x is None or _is_leaf(x))
    return [
        None if leaf is None else as_placements(leaf, mesh, f"{argument}[{i}]")
        for i, leaf in enumerate(leaves)
    ]


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Placement):
        return True
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(v, Placement) for v in value)


def as_placements(leaf: Any, mesh: MeshSpec, argument: str) -> Placements:
    """One placement per mesh axis from a leaf; ShardingError, naming `argument`, if it is none."""
    if not _is_leaf(leaf):
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
