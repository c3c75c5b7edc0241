"""Which samples of an epoch a rank reads, batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from passes.layout.layout import nested_sizes

__all__ = ["BatchPart", "BatchSplit", "PartSampler"]


@dataclass(frozen=True)
class BatchSplit:
    """How a batch is split over the ranks.

    batch_size: samples in a whole batch, of all ranks together.
    axis_sizes: of the mesh axes that split dim 0, major first.
    sizes:      of the parts of a whole batch, or None for torch.chunk's.
    """

    batch_size: int
    axis_sizes: tuple[int, ...]
    sizes: tuple[int, ...] | None = None

    def parts(self, length: int) -> tuple[int, ...]:
        """Samples per linear index of a batch of `length`: a shorter one is split by torch.chunk again, or in
        proportion to `sizes`, each end rounded down."""
        if self.sizes is None:
            return nested_sizes(length, self.axis_sizes)
        ends = [end * length // self.batch_size for end in itertools.accumulate(self.sizes)]
        return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


@dataclass(frozen=True)
class BatchPart:
    """One rank's samples of a batch. first: of the batch, so that a part with no samples still has a
    sample to take its shapes from. epoch: for random numbers."""

    indices: tuple[int, ...]
    first: int
    epoch: int


class PartSampler(Sampler[BatchPart]):
    """One rank's part of every batch of an epoch, from batch `start` on.

    The batches joined over the ranks are those of a single process: consecutive runs of batch_size in one
    order of all samples, a permutation by torch's generator seeded with seed + epoch. No sample is
    repeated or padded, and every rank has as many batches. Iterated in the main process only.

    length: of the dataset. index: of this rank among those that split the batch.
    """

    def __init__(
        self, length: int, split: BatchSplit, index: int, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.length = length
        self.split = split
        self.index = index
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        size = self.split.batch_size
        return self.length // size if self.drop_last else -(-self.length // size)

    def __iter__(self) -> Iterator[BatchPart]:
        order = self._order()
        size = self.split.batch_size
        for batch in range(self.start, len(self)):
            samples = order[batch * size : (batch + 1) * size].tolist()
            parts = self.split.parts(len(samples))
            low = sum(parts[: self.index])
            yield BatchPart(tuple(samples[low : low + parts[self.index]]), samples[0], self.epoch)

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator)
