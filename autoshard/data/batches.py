"""From one rank's sample numbers to its batch: reading, collating, cutting."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from autoshard.data.rank_sampler import BatchPart, Sizes, inner_spans
from cost_model.errors import ShardingError, reject
from cost_model.mesh import MeshSpec
from passes.ir.process_state import random_state_kept
from passes.layout.layout import Span

Slices = tuple[slice, ...]


@runtime_checkable
class PartialDataset(Protocol):
    """A map-style dataset from which a rank reads only its part of every sample.

    shapes: like a sample, with the shape of a tensor in place of each: {"x": (3, 97, 101), "y": ()}.
    read:   a sample cut to `slices`, which is like a sample too, with a tuple of slices, one per dim (of step
            1, maybe empty), in place of each tensor.
    """

    @property
    def shapes(self) -> Any: ...

    def __len__(self) -> int: ...

    def read(self, index: int, slices: Any) -> Any: ...


class ArrayDataset(Dataset[Any]):
    """Samples along dim 0 of tensors or numpy arrays, memory-mapped ones included; reads what is asked for.

        ArrayDataset(images, labels)           samples are tuples
        ArrayDataset(x=images, y=labels)       samples are dicts

    A sample is a copy. Raises ShardingError for arrays of different lengths.
    """

    def __init__(self, *arrays: Tensor | np.ndarray, **named: Tensor | np.ndarray) -> None:
        if bool(arrays) == bool(named):
            raise ShardingError(
                "ArrayDataset takes arrays by position or by name\n  try: ArrayDataset(x, y), ArrayDataset(x=x)"
            )
        self.arrays = dict(enumerate(arrays)) or named
        self._as_tuple = bool(arrays)
        for key, array in self.arrays.items():
            if not hasattr(array, "shape") or not hasattr(array, "__getitem__") or not len(array.shape):
                raise reject(
                    f"array {key} of an ArrayDataset", array, "a tensor or an array with samples along dim 0"
                )
        lengths = {key: len(array) for key, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ShardingError(
                f"the arrays of an ArrayDataset have lengths {lengths}\n  try: as many samples in each"
            )

    @property
    def shapes(self) -> Any:
        return self._sample({key: tuple(array.shape[1:]) for key, array in self.arrays.items()})

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Any:
        return self._sample({key: _copied(array, index, ()) for key, array in self.arrays.items()})

    def read(self, index: int, slices: Any) -> Any:
        """The sample cut to `slices`: {name: slices} or one tuple of slices per array."""
        return self._sample({key: _copied(array, index, slices[key]) for key, array in self.arrays.items()})

    def _sample(self, values: dict[Any, Any]) -> Any:
        return tuple(values.values()) if self._as_tuple else values


def _copied(array: Tensor | np.ndarray, index: int, slices: Slices) -> Tensor:
    part = array[(index, *slices)]
    # A copy in memory of just the part: a map may be read-only, and closed while the sample lives.
    return part.clone() if isinstance(part, Tensor) else torch.from_numpy(np.array(part))


@dataclass(eq=False)
class PartReader(Dataset[Any]):
    """A BatchPart -> the batch: what the DataLoader's workers run.

    A sample's random numbers (torch, numpy, random) depend on seed, epoch and index only, and the
    caller's generators stay as they were. A part without samples has every tensor's dim 0 empty.
    """

    _read: Callable[[int], Any]
    _finish: Callable[[Any], Any]
    _collate: Callable[[list[Any]], Any]
    _seed: int

    def __getitem__(self, part: BatchPart) -> Any:
        with random_state_kept():
            read = [self._sample(index, part.epoch) for index in part.indices or (part.first,)]
            batch = self._collate(read)
        if not part.indices:
            batch = _map_tensors(lambda tensor: tensor[:0], batch)
        return self._finish(batch)

    def _sample(self, index: int, epoch: int) -> Any:
        digest = hashlib.blake2b(f"{self._seed}/{epoch}/{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest)
        torch.default_generator.manual_seed(seed >> 1)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        return self._read(index)


def batch_reader(
    dataset: Any,
    placements: Any,
    mesh: MeshSpec,
    rank: int,
    sizes: Sizes | None,
    collate: Callable[[list[Any]], Any],
    seed: int,
) -> PartReader:
    """Reads parts of samples where the dataset can. Raises ShardingError for placements that do not fit its
    `shapes`."""
    if not isinstance(dataset, PartialDataset):
        # The batch is cut, since only there every tensor has its final form.
        finish = partial(_cut_batch, placements, mesh, rank, sizes)
        return PartReader(dataset.__getitem__, finish, collate, seed)
    shapes, structure = pytree.tree_flatten(dataset.shapes, is_leaf=_is_shape)
    if not all(_is_shape(shape) for shape in shapes):
        raise ShardingError(
            f"shapes of the dataset is {dataset.shapes!r}\n"
            "  try: a tuple of lengths for each tensor of a sample, in a tuple or dict like the sample"
        )
    batch = pytree.tree_unflatten([torch.empty((1, *shape), device="meta") for shape in shapes], structure)
    spans = inner_spans(placements, batch, mesh, rank, sizes)
    slices = pytree.tree_unflatten([tuple(slice(*span) for span in part) for part in spans], structure)
    return PartReader(partial(_read_part, dataset, slices), as_it_is, collate, seed)


def _cut_batch(placements: Any, mesh: MeshSpec, rank: int, sizes: Sizes | None, batch: Any) -> Any:
    spans = iter(inner_spans(placements, batch, mesh, rank, sizes))
    return _map_tensors(lambda tensor: _cut(tensor, next(spans)), batch)


def _read_part(dataset: PartialDataset, slices: Any, index: int) -> Any:
    return dataset.read(index, slices)


def as_it_is(batch: Any) -> Any:
    return batch


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(length, int) for length in value)


def _map_tensors(fn: Callable[[Tensor], Tensor], batch: Any) -> Any:
    return pytree.tree_map(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _cut(tensor: Tensor, spans: tuple[Span, ...]) -> Tensor:
    part = tensor
    for dim, (lo, hi) in enumerate(spans, start=1):
        part = part.narrow(dim, lo, hi - lo)
    if part.shape == tensor.shape:
        return tensor
    # A copy always: a view would keep the whole alive, and workers would send it.
    return part.clone(memory_format=torch.contiguous_format)
