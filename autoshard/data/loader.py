"""`data_loader`: torch's DataLoader, of which every rank reads only its part of every batch: reading, collating,
cutting.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from autoshard.data.rank_sampler import (
    BatchPart,
    BatchSplit,
    PartSampler,
    Sizes,
    batch_axes,
    checked_sizes,
    inner_spans,
    member,
)
from autoshard.watching.agreement import agree, collectively
from cost_model.errors import (
    PlanError,
    ShardingError,
    checked_count,
    checked_flag,
    is_whole,
    reject,
    shown,
    type_of,
)
from cost_model.mesh import MeshSpec
from passes.ir.process_state import random_state_kept
from passes.layout.layout import Span

Slices = tuple[slice, ...]
Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples."""


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
class _PartReader(Dataset[Any]):
    """A BatchPart -> the batch: what the DataLoader's workers run.

    A sample's random numbers (torch, numpy, random) depend on seed, epoch and index only, and the
    caller's generators stay as they were. A part without samples has every tensor's dim 0 empty.
    """

    _read: Callable[[int], Any]
    _finish: Callable[[Any], Any]
    _collate: Collate
    _seed: int

    def __getitem__(self, part: BatchPart) -> Any:
        with random_state_kept():
            read = [self._sample(index, part.epoch) for index in part.indices or (part.first,)]
            batch = self._collate(read)
        if not part.indices:
            batch = pytree.tree_map_only(Tensor, lambda tensor: tensor[:0], batch)
        return self._finish(batch)

    def _sample(self, index: int, epoch: int) -> Any:
        digest = hashlib.blake2b(f"{self._seed}/{epoch}/{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest)
        torch.default_generator.manual_seed(seed >> 1)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        return self._read(index)


def _batch_reader(
    dataset: Any, placements: Any, mesh: MeshSpec, rank: int, order: Order, collate: Collate
) -> _PartReader:
    """Reads parts of samples where the dataset can. Raises ShardingError for placements that do not fit its
    `shapes`."""
    if not isinstance(dataset, PartialDataset):
        # The batch is cut, since only there every tensor has its final form.
        finish = partial(_cut_batch, placements, mesh, rank, order.sizes)
        return _PartReader(dataset.__getitem__, finish, collate, order.seed)
    shapes, structure = pytree.tree_flatten(dataset.shapes, is_leaf=_is_shape)
    if not all(_is_shape(shape) for shape in shapes):
        raise ShardingError(
            f"shapes of the dataset is {dataset.shapes!r}\n"
            "  try: a tuple of lengths for each tensor of a sample, in a tuple or dict like the sample"
        )
    batch = pytree.tree_unflatten([torch.empty((1, *shape), device="meta") for shape in shapes], structure)
    spans = inner_spans(placements, batch, mesh, rank, order.sizes)
    slices = pytree.tree_unflatten([tuple(slice(*span) for span in part) for part in spans], structure)
    return _PartReader(partial(_read_part, dataset, slices), _as_it_is, collate, order.seed)


def _cut_batch(placements: Any, mesh: MeshSpec, rank: int, sizes: Sizes | None, batch: Any) -> Any:
    spans = iter(inner_spans(placements, batch, mesh, rank, sizes))
    return pytree.tree_map_only(Tensor, lambda tensor: _cut(tensor, next(spans)), batch)


def _read_part(dataset: PartialDataset, slices: Any, index: int) -> Any:
    return dataset.read(index, slices)


def _as_it_is(batch: Any) -> Any:
    return batch


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(length, int) for length in value)


def _cut(tensor: Tensor, spans: tuple[Span, ...]) -> Tensor:
    part = tensor
    for dim, (lo, hi) in enumerate(spans, start=1):
        part = part.narrow(dim, lo, hi - lo)
    if part.shape == tensor.shape:
        return tensor
    # A copy always: a view would keep the whole alive, and workers would send it.
    return part.clone(memory_format=torch.contiguous_format)


def data_loader(
    dataset: Dataset[Any],
    mesh: DeviceMesh,
    placements: Any,
    *,
    batch_size: int,
    sizes: Sizes | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Collate = default_collate,
    **options: Any,
) -> PartLoader:
    """A DataLoader whose batches are this rank's part of the global ones: what a model made with
    `autoshard(..., in_placements=placements)` is called with.

        loader = autoshard.data_loader(data, mesh, [Shard(0), Shard(2)], batch_size=32, shuffle=True)
        for epoch in range(loader.epoch, 90):
            for x, y in loader: ...

    dataset:    map-style. Ranks read whole samples and cut them, or, of a `PartialDataset` such as
                `ArrayDataset`, only their part.
    placements: as in_placements: placements for all tensors of a batch, or a nest or {name: placements}
                with one leaf per tensor. Axes that split dim 0 share out the samples, and must be the same
                for all tensors; ranks along the others get the same samples.
    batch_size: samples in a global batch.
    sizes:      {dim of the batch: length of each part}; other dims get torch.chunk's.
    shuffle, seed: another order every epoch, the same on every rank.
    drop_last:  leave out a last batch of fewer samples.
    collate_fn: list of samples -> batch. It may get cut samples, so it must not look at whole ones.
    options:    of DataLoader: num_workers, pin_memory, ...

    Random numbers of torch, numpy and `random` in the dataset are seeded per sample by seed, epoch and
    index, so that ranks, workers and resumed runs agree. Every rank of the mesh must call it; raises
    ShardingError on all if any argument is bad, PlanError if they differ between ranks.
    """
    spec, rank = member(mesh)
    checked_flag(shuffle, "shuffle")
    checked_flag(drop_last, "drop_last")
    checked_count(seed, "seed")
    if not callable(collate_fn):
        raise reject("collate_fn", collate_fn, "a function: list of samples -> batch")
    checked_sizes(sizes)
    order = Order(batch_size, sizes, shuffle, seed, drop_last)
    loader = collectively(
        mesh, lambda: rank_loader(dataset, spec, rank, placements, order, collate_fn, options)
    )
    said = {"samples in the dataset": loader.parts.length, "placements": placements, **vars(order)}
    agree(mesh, {name: str(value) for name, value in said.items()})
    return loader


@dataclass(frozen=True)
class Order:
    """Which samples make which part of which batch; as in `data_loader`."""

    batch_size: int
    sizes: Sizes | None = None
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False


def rank_loader(
    dataset: Any,
    mesh: MeshSpec,
    rank: int,
    placements: Any,
    order: Order,
    collate: Collate = default_collate,
    options: Mapping[str, Any] | None = None,
) -> PartLoader:
    """The loader of one rank, without asking the others. Raises ShardingError as `data_loader` does."""
    axes = batch_axes(placements, mesh, order.sizes, order.batch_size)
    given = None if order.sizes is None else order.sizes.get(0)
    split = BatchSplit(order.batch_size, tuple(map(mesh.size, axes)), None if given is None else tuple(given))
    index, how = mesh.linear_index(rank, axes), (order.shuffle, order.seed, order.drop_last)
    sampler = PartSampler(_length(dataset), split, index, *how)
    _check_batches(sampler)
    reader = _batch_reader(dataset, placements, mesh, rank, order, collate)
    try:
        return PartLoader(reader, sampler, options or {})
    except (TypeError, ValueError, AssertionError) as error:
        raise ShardingError(
            f"data_loader: torch's DataLoader refuses its options {sorted(options or {})}: {error}\n"
            "  try: num_workers, pin_memory, ... as DataLoader takes them"
        ) from None


class PartLoader(DataLoader[Any]):
    """Made by `data_loader`. epoch: the present one, or the next after a whole one; 0 at first.

    Iterating starts an epoch from its first batch, except once after `load_state_dict`.
    """

    def __init__(self, reader: _PartReader, sampler: PartSampler, options: Mapping[str, Any]) -> None:
        super().__init__(reader, batch_size=None, sampler=sampler, collate_fn=_as_it_is, **options)
        self.epoch = 0
        self._done = 0  # batches of this epoch that were handed out
        self._resume = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; a resumed loader that is in it stays where it is."""
        epoch = checked_count(epoch, "epoch")
        if epoch != self.epoch:
            self.epoch, self._done, self._resume = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.parts
        sampler.epoch, sampler.start = self.epoch, self._resume
        self._done, self._resume = self._resume, 0
        for batch in super().__iter__():
            self._done += 1
            yield batch
        self.epoch, self._done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: the batch that a loop is in counts as done. The same on all ranks."""
        return {"epoch": self.epoch, "batch": self._done, **self._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there. PlanError if the state is of other samples, batches or order, or is none."""
        said = [state.get(name) for name in self.state_dict()] if isinstance(state, Mapping) else [None]
        if any(not is_whole(value) or int(value) < 0 for value in said):
            raise PlanError(
                f"state is {shown(state)}, and no loader's\n  try: what the loader's state_dict() returned"
            )
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise PlanError(
                    f"the loader's state has {name} {state[name]}; this loader has {mine}\n"
                    "  try: the dataset and arguments that the state was saved with"
                )
        self.epoch, self._done, self._resume = state["epoch"], state["batch"], state["batch"]

    def _identity(self) -> dict[str, int]:
        """Everything that decides the order of batches. The mesh does not: a state may be loaded on another one."""
        parts = self.parts
        return {
            "length": parts.length,
            "batch_size": parts.split.batch_size,
            "seed": parts.seed,
            "shuffle": int(parts.shuffle),
            "drop_last": int(parts.drop_last),
        }

    @property
    def parts(self) -> PartSampler:
        """The sampler: this rank's part of every batch."""
        assert isinstance(self.sampler, PartSampler)
        return self.sampler


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ShardingError(
            f"dataset is {type_of(dataset)}, which has no length\n"
            "  try: a map-style dataset, with __len__ and __getitem__"
        ) from None


def _check_batches(sampler: PartSampler) -> None:
    split, length = sampler.split, sampler.length
    if not len(sampler):
        raise ShardingError(
            f"dataset has {length} samples, fewer than batch_size {split.batch_size}: there is no batch\n"
            "  try: a smaller batch_size, or drop_last=False"
        )
    rest = length % split.batch_size
    if sampler.drop_last or not rest or length < split.batch_size:
        return
    whole, last = split.parts(split.batch_size), split.parts(rest)
    if any(a == b for a, b in zip(whole, last, strict=True)):
        # A rank knows the graph of a call by the shapes of its own part: ranks would run different ones.
        raise ShardingError(
            f"the last batch has {rest} samples, {list(last)} on the ranks that split it; a whole one has "
            f"{split.batch_size}, {list(whole)}: some ranks could not tell them apart by their own shapes\n"
            "  try: drop_last=True, or a batch_size that divides the dataset"
        )
