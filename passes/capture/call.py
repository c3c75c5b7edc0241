"""`CallSpec`: how one call of a model maps to the flat tensors of its graph, and back."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.capture.decomposed_places import Lies, laid, lies_as
from passes.capture.places import Place
from passes.capture.provenance import check_dense, is_dense
from passes.capture.questions import Check
from passes.capture.stand_ins import Number, widest
from passes.capture.trees import (
    Instance,
    Nest,
    TensorLeaf,
    Tree,
    assembled,
    flatten,
    has_tensor,
    items_of,
    unflatten,
)
from passes.ir.torch_dtensor import local_of, take_place_of


def _is_split(value: Tensor) -> bool:
    return isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)


def number_indices(tree: Tree) -> list[int]:
    """Of the tensors that are numbers to the user."""
    if isinstance(tree, Number):
        return [tree.index]
    return [index for child in getattr(tree, "children", ()) for index in number_indices(child)]


def with_tensors(tree: Tree, value: Any) -> Any:
    """`value`, whose structure is `tree`, with a tensor for each number that is one there: read of a tensor, or counted
    (`z[keep].shape[0]`)."""
    return _with_tensors(tree, value, {})


def _with_tensors(tree: Tree, value: Any, found: dict[int, Tensor]) -> Any:
    """found: by index, as a number may be in two places."""
    if isinstance(tree, Number):
        known = torch.tensor(value)
        return found.setdefault(tree.index, torch.tensor(value, dtype=widest(known).dtype))
    if isinstance(tree, TensorLeaf):
        return value if isinstance(value, Tensor) else torch.tensor(value)
    if not isinstance(tree, (Nest, Instance)) or (isinstance(tree, Instance) and not number_indices(tree)):
        return value
    pairs = zip(tree.children, items_of(tree, value), strict=True)
    items = [_with_tensors(*pair, found) for pair in pairs]
    if not isinstance(tree, Instance):
        return assembled(tree, items)
    twin = copy.copy(value)
    vars(twin).update(zip(tree.names, items, strict=True))
    return twin


def held_in(tree: Tree) -> set[int]:
    """Of a call's (args, kwargs): which tensors are only in lists, dicts and objects, where others may take their
    place (`put_tensors`)."""
    arguments = [child for side in getattr(tree, "children", ()) for child in side.children]
    placed = [pair for child in arguments for pair in ((child, False), *_holders(child))]
    fixed = {child.index for child, held in placed if isinstance(child, TensorLeaf) and not held}
    return {child.index for child, _ in placed if isinstance(child, TensorLeaf)} - fixed


def _holders(tree: Tree) -> Iterator[tuple[Tree, bool]]:
    """All inside, and whether its place can be given to something else."""
    for child in getattr(tree, "children", ()):
        yield child, isinstance(tree, Instance) or (isinstance(tree, Nest) and tree.kind in (list, dict))
        yield from _holders(child)


def put_tensors(tree: Tree, value: Any, new: Mapping[int, Any]) -> None:
    """Into the lists, dicts and objects of `value`, whose structure is `tree`, in the place of tensors by index."""
    if not isinstance(tree, (Nest, Instance)):
        return
    keys = tree.names if isinstance(tree, Instance) else tree.keys or range(len(tree.children))
    for key, child, item in zip(keys, tree.children, items_of(tree, value), strict=True):
        if not isinstance(child, TensorLeaf):
            put_tensors(child, item, new)
        elif child.index in new and not isinstance(value, tuple):
            (vars(value) if isinstance(tree, Instance) else value)[key] = new[child.index]


@dataclass(frozen=True)
class TensorKey:
    """What of an input tensor a graph depends on; its device is not: the graph runs on the mesh's, and CPU tensors
    are moved there. placements: of a DTensor, whose shape is global. lies: in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: tuple[Hashable, ...]
    lies: Lies = None

    @staticmethod
    def of(tensor: Tensor) -> TensorKey:
        placements = tuple(getattr(tensor, "placements", ()))
        return TensorKey(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, placements, lies_as(tensor))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class CallKey:
    """Two calls with equal keys in the same mode (training flags, gradients, autocast) run the same graph."""

    tree: Tree
    tensors: tuple[TensorKey, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.tree, self.tensors))

    @cached_property
    def has_dtensors(self) -> bool:
        return any(tensor.placements for tensor in self.tensors)

    @cached_property
    def in_order(self) -> CallKey:
        """As if all tensors were contiguous."""
        if all(tensor.lies is None for tensor in self.tensors):
            return self
        return CallKey(self.tree, tuple(replace(tensor, lies=None) for tensor in self.tensors))


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], CallKey]:
    """(tensors in the order of the graph's "input" placeholders, key) of a call's arguments. Everything that is no
    tensor is part of the key."""
    values = (*args, *kwargs.values())
    if all(type(value) is Tensor and is_dense(value) for value in values) and len(
        set(map(id, values))
    ) == len(values):
        # The usual call, of tensors alone: its key is made once.
        looks = tuple([(value.shape, value.dtype, value.requires_grad, lies_as(value)) for value in values])
        return list(values), _key_of_tensors(looks, tuple(kwargs))
    return _flattened(args, kwargs)


def _flattened(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], CallKey]:
    tensors, tree = flatten((args, dict(kwargs)), arguments=True)
    if not all(map(is_dense, tensors)):
        for tensor, name in zip(tensors, tensor_names(CallKey(tree, ())), strict=True):
            check_dense(tensor, name)
    return tensors, CallKey(tree, tuple(TensorKey.of(t) for t in tensors))


@lru_cache(maxsize=256)
def _key_of_tensors(
    looks: tuple[tuple[torch.Size, torch.dtype, bool, Lies], ...], names: tuple[str, ...]
) -> CallKey:
    like = [
        laid(shape, lies, dtype=dtype, device="meta").requires_grad_(grad)
        for shape, dtype, grad, lies in looks
    ]
    count = len(like) - len(names)
    return _flattened(tuple(like[:count]), dict(zip(names, like[count:], strict=True)))[1]


def tensor_names(key: CallKey) -> list[str]:
    """Per tensor a readable path: "args[0]", "input_ids", "cache.layers[0].keys"."""
    args, kwargs = _arguments(key)
    paths = tensor_paths(args, "args")
    for name, tree in kwargs.items():
        paths = {**tensor_paths(tree, name), **paths}
    return [paths[i] for i in sorted(paths)]


def tensor_paths(tree: Tree, root: str = "") -> dict[int, str]:
    """Where each tensor first appears: {0: "x", 1: "cache.layers[0].keys"}."""
    return dict(reversed(list(_paths(tree, root))))


def _paths(tree: Tree, path: str) -> Iterator[tuple[int, str]]:
    if isinstance(tree, (TensorLeaf, Number)):
        yield tree.index, path
    elif isinstance(tree, (Nest, Instance)):
        for step, child in zip(_steps(tree), tree.children, strict=True):
            yield from _paths(child, path + step)


def _steps(tree: Nest | Instance) -> list[str]:
    if isinstance(tree, Instance):
        return [f".{name}" for name in tree.names]
    count = len(tree.children)
    if tree.kind is dict:
        return [f"[{key!r}]" for key in tree.keys]
    if (
        isinstance(tree.keys, tuple)
        and len(tree.keys) == count
        and all(isinstance(k, str) for k in tree.keys)
    ):
        return [f".{key}" for key in tree.keys]
    return [f"[{i}]" for i in range(count)]


def _arguments(key: CallKey) -> tuple[Tree, dict[str, Tree]]:
    args, kwargs = _children(key.tree)
    assert isinstance(kwargs, Nest)
    return args, dict(zip(kwargs.keys, kwargs.children, strict=True))


def _children(tree: Tree) -> tuple[Tree, ...]:
    assert isinstance(tree, Nest)
    return tree.children


@dataclass(frozen=True)
class CallSpec:
    """key: of the captured call. outputs: the structure of (what it returns, what it leaves in `places`), whose flat
    tensors are the first of `output_count`; the first `returned` of these are returned. overwritten: the inputs whose
    new values are the last of them: the forward changes them in place, and may return them too."""

    key: CallKey
    outputs: Tree
    output_count: int
    returned: int
    places: tuple[Place, ...] = ()
    overwritten: tuple[int, ...] = ()

    @cached_property
    def checks(self) -> tuple[tuple[int | None, Check], ...]:
        """What the forward asks of values, and the outputs that say whether they are as the program supposes. None: of
        a number that is only kept nothing is supposed."""
        return tuple(
            (getattr(tree, "index", None), place) for tree, place in self._left if isinstance(place, Check)
        )

    @property
    def branches(self) -> dict[int, Check]:
        """Of these, by output, those with two sides: where one comes out otherwise, the forward does something else."""
        return {index: check for index, check in self.checks if index is not None and check.error is None}

    @property
    def _left(self) -> Iterator[tuple[Tree, Place]]:
        return zip(_children(_children(self.outputs)[1]), self.places, strict=True)

    @property
    def returned_tree(self) -> Tree:
        """The structure of what the call returns."""
        return _children(self.outputs)[0]

    def copied(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with containers and objects of its own, and with its own copies of tensors that the forward
        changes."""
        tensors, key = flatten_call(args, kwargs)
        tensors = [t.clone() if i in self.overwritten else t for i, t in enumerate(tensors)]
        return unflatten(key.tree, tensors)

    def unflatten(self, outputs: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The user's returned structure around the flat `outputs`. What the forward leaves in places is put there, and
        the tensors it changes among the arguments of this call get their new values."""
        assert len(outputs) == self.output_count, (len(outputs), self.output_count)
        if self.overwritten:
            outputs = self._overwrite(outputs, args, kwargs)
        result, left = unflatten(self.outputs, outputs)
        for place, value in zip(self.places, left, strict=True):
            place.put((args, kwargs), value)
        return result

    def _overwrite(
        self, outputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """`outputs`, with the call's own tensors in the place of their new values. Where a plan splits what is a plain
        tensor still, a DTensor takes its place."""
        tensors, key = flatten_call(args, kwargs)
        first = self.output_count - len(self.overwritten)
        split: dict[int, Tensor] = {}
        with torch.no_grad():
            for index, value in zip(self.overwritten, outputs[first:], strict=True):
                if isinstance(value, DTensor) and isinstance(tensors[index], DTensor):
                    take_place_of(tensors[index], value)
                elif _is_split(value):
                    split[index] = value
                else:
                    tensors[index].copy_(local_of(value))
        if split:
            put_tensors(key.tree, (args, kwargs), split)
        return [*outputs[:first], *(split.get(index, tensors[index]) for index in self.overwritten)]

    def flatten_outputs(
        self, returned: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """The flat tensors of what the unmodified model just returned for this call, and of what it left."""
        left = [(tree, place) for tree, place in self._left if has_tensor(tree)]
        outputs = Nest(tuple, (), (self.returned_tree, *(tree for tree, _ in left)))
        found = (returned, *(place.get((args, kwargs)) for _, place in left))
        tensors, _ = flatten(with_tensors(outputs, found))
        inputs, _ = flatten_call(args, kwargs)
        changed = [inputs[index] for index in self.overwritten]
        own = [one for one in tensors if not any(one is other for other in changed)]
        return [*own, *changed]
