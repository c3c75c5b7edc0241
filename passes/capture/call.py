"""`CallSpec`: how one call of a model maps to the flat tensors of its graph, and back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_model.errors import ShardingError
from passes.capture.trees import Mapped, Sequenced, Tree, flatten, tensor_paths, unflatten

__all__ = ["CallSpec", "flatten_call", "tensor_names"]


@dataclass(frozen=True)
class TensorKey:
    """What of an input tensor a graph depends on; its device is not: the graph runs on the mesh's, and CPU tensors
    are moved there. placements: of a DTensor, whose shape is global."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: tuple[Hashable, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorKey:
        placements = tuple(getattr(tensor, "placements", ()))
        return TensorKey(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, placements)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class CallKey:
    """Two calls with equal keys in the same mode (training flags, gradients, autocast) run the same graph."""

    tree: Tree
    tensors: tuple[TensorKey, ...]


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], CallKey]:
    """(tensors, key) of a call's arguments; everything that is no tensor is part of the key."""
    tensors, tree = flatten((args, dict(kwargs)))
    return tensors, CallKey(tree, tuple(TensorKey.of(t) for t in tensors))


def tensor_names(key: CallKey) -> list[str]:
    """Per tensor a readable path: "args[0]", "input_ids", "cache.layers[0].keys"."""
    args, kwargs = _arguments(key)
    paths = tensor_paths(args, "args")
    for name, tree in kwargs.items():
        paths = {**tensor_paths(tree, name), **paths}
    return [paths[i] for i in range(len(key.tensors))]


def _arguments(key: CallKey) -> tuple[Tree, dict[str, Tree]]:
    assert isinstance(key.tree, Sequenced)
    args, kwargs = key.tree.children
    assert isinstance(kwargs, Mapped)
    return args, dict(zip(kwargs.keys, kwargs.children, strict=True))


@dataclass(frozen=True)
class CallSpec:
    """key: of the captured call. outputs: the returned structure. output_count: its flat tensors."""

    key: CallKey
    outputs: Tree
    output_count: int

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], CallKey]:
        """(tensors in the order of the graph's "input" placeholders, key). O(leaves), no checks."""
        return flatten_call(args, kwargs)

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The user's returned structure around the flat `outputs`."""
        assert len(outputs) == self.output_count, (len(outputs), self.output_count)
        return unflatten(self.outputs, outputs)

    def flatten_outputs(self, returned: Any) -> list[Tensor]:
        """The flat tensors of what the unmodified model returned for the same call."""
        tensors, _ = flatten(returned)
        return tensors

    @property
    def input_names(self) -> list[str]:
        return tensor_names(self.key)

    def check(self, key: CallKey) -> None:
        """Raise ShardingError, naming the argument, unless `key` is this call at other sizes.

        Other sizes, and other values of arguments that are no tensors, give another graph of the
        same model; another structure, dtype or number of dims is a mistake.
        """
        self._check_structure(key)
        for name, wanted, got in zip(tensor_names(key), self.key.tensors, key.tensors, strict=True):
            if got.dtype != wanted.dtype:
                raise ShardingError(
                    f"{name} is {got}, but the model was captured with {wanted}\n  try: {name}.to({wanted.dtype})"
                )
            if len(got.shape) != len(wanted.shape):
                raise ShardingError(
                    f"{name} has {len(got.shape)} dims {list(got.shape)}, but the model was captured with "
                    f"{len(wanted.shape)} {list(wanted.shape)}\n  try: pass it with {len(wanted.shape)} dims"
                )

    def _check_structure(self, key: CallKey) -> None:
        (args, kwargs), (wanted_args, wanted_kwargs) = _arguments(key), _arguments(self.key)
        assert isinstance(args, Sequenced) and isinstance(wanted_args, Sequenced)
        given, wanted = len(args.children), len(wanted_args.children)
        if given != wanted:
            raise ShardingError(
                f"the call has {given} positional arguments, but the model was captured with {wanted}\n"
                "  try: call it as in the captured call"
            )
        for name in sorted(wanted_kwargs.keys() ^ kwargs.keys()):
            problem = "is missing from" if name in wanted_kwargs else "is not an argument of"
            have = ", ".join(wanted_kwargs) or "no keyword arguments"
            raise ShardingError(
                f"{name} {problem} the captured call, which has {have}\n  try: call it the same way"
            )
        pairs = [
            (f"args[{i}]", *pair)
            for i, pair in enumerate(zip(wanted_args.children, args.children, strict=True))
        ]
        pairs += [(name, wanted_kwargs[name], kwargs[name]) for name in kwargs]
        for name, old, new in pairs:
            if not _same_paths(old, new):
                raise ShardingError(
                    f"{name} holds tensors at {_shown(new, name)}, but the model was captured with {_shown(old, name)}"
                    "\n  try: pass the same structure"
                )


def _same_paths(a: Tree, b: Tree) -> bool:
    return list(tensor_paths(a).values()) == list(tensor_paths(b).values())


def _shown(tree: Tree, name: str) -> str:
    return ", ".join(tensor_paths(tree, name).values()) or "no place"
