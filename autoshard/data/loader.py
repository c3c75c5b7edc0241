"""`data_loader`: torch's DataLoader, of which every rank reads only its part of every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, default_collate

from autoshard.data.batches import PartReader, as_it_is, batch_reader
from autoshard.data.rank_sampler import BatchSplit, PartSampler, Sizes, batch_axes, checked_sizes, member
from autoshard.watching.agreement import agree, collectively
from cost_model.errors import PlanError, ShardingError, checked_count, checked_flag, is_whole, reject, shown
from cost_model.mesh import MeshSpec


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
    collate_fn: Callable[[list[Any]], Any] = default_collate,
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
    collate: Callable[[list[Any]], Any] = default_collate,
    options: Mapping[str, Any] | None = None,
) -> PartLoader:
    """The loader of one rank, without asking the others. Raises ShardingError as `data_loader` does."""
    axes = batch_axes(placements, mesh, order.sizes, order.batch_size)
    given = None if order.sizes is None else order.sizes.get(0)
    split = BatchSplit(order.batch_size, tuple(map(mesh.size, axes)), None if given is None else tuple(given))
    index, how = mesh.linear_index(rank, axes), (order.shuffle, order.seed, order.drop_last)
    sampler = PartSampler(_length(dataset), split, index, *how)
    _check_batches(sampler)
    reader = batch_reader(dataset, placements, mesh, rank, order.sizes, collate, order.seed)
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

    def __init__(self, reader: PartReader, sampler: PartSampler, options: Mapping[str, Any]) -> None:
        super().__init__(reader, batch_size=None, sampler=sampler, collate_fn=as_it_is, **options)
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
            f"dataset is a {type(dataset).__name__}, which has no length\n"
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
