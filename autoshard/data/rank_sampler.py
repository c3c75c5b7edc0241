"""Which part of a tensor each rank holds, by placements and explicit sizes; and which samples of an epoch it reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.utils.data import Sampler

from autoshard.global_call import as_call, leaf_names, matched_placements
from autoshard.planning import mesh_spec
from cost_model.errors import ShardingError, checked_count, is_whole, reject, type_of
from cost_model.mesh import MeshSpec
from passes.layout.layout import Layout, Span, nested_sizes
from passes.layout.placements import placement_leaves, placements_to_layout

Placements = Placement | Sequence[Placement]
"""One per mesh axis; on a mesh of one axis also alone."""

Sizes = Mapping[int, Sequence[int]]
"""Tensor dim -> length of each part, by linear index over the mesh axes that split it, major first."""


def member(mesh: DeviceMesh) -> tuple[MeshSpec, int]:
    """(the mesh by names and sizes, this rank). ShardingError on a rank that is not in the mesh."""
    if isinstance(mesh, MeshSpec):
        raise ShardingError(
            "mesh is a MeshSpec, which has no processes to run on\n  try: init_device_mesh(...)"
        )
    spec = mesh_spec(mesh)
    if mesh.get_coordinate() is None:
        raise ShardingError(
            f"rank {mesh.get_rank()} is not in {spec}\n  try: call this on the ranks of the mesh only"
        )
    return spec, mesh.get_rank()


def checked_sizes(sizes: object) -> Sizes | None:
    """`sizes` if it is one; ShardingError for anything else. Whether it fits a tensor is another question."""
    if sizes is None:
        return None
    if not isinstance(sizes, Mapping):
        raise reject("sizes", sizes, "{dim: [length of each part]}")
    found: dict[int, list[int]] = {}
    for dim, parts in sizes.items():
        if not is_whole(dim):
            raise reject("a dim in sizes", dim, "{dim: [length of each part]}")
        if not isinstance(parts, (list, tuple)):
            raise reject(f"sizes[{dim}]", parts, "a list, the length of each part")
        found[dim] = [checked_count(part, f"sizes[{dim}][{i}]") for i, part in enumerate(parts)]
    return found


def sized(layout: Layout, shape: Sequence[int], mesh: MeshSpec, sizes: Sizes | None, what: str) -> Layout:
    """`layout` with the given sizes. ShardingError if they do not fit."""
    given: list[tuple[int, ...] | None] = [None] * len(shape)
    for dim, parts in (sizes or {}).items():
        if not -len(shape) <= dim < len(shape):
            raise ShardingError(
                f"sizes has dim {dim}; {what} has {len(shape)} dims {tuple(shape)}\n"
                f"  try: 0 <= dim < {len(shape)}"
            )
        given[dim] = _checked_sizes(tuple(parts), dim % len(shape), shape, layout, mesh, what)
    return Layout.of(shape, mesh, layout.dims, (), given)


def refuse_partial(layout: Layout, what: str) -> Layout:
    """`layout` itself; ShardingError if it has a pending reduction."""
    if layout.partial:
        raise ShardingError(
            f"{what} is Partial over axis {layout.partial[0][0]!r}; data is split or replicated\n"
            "  try: Shard(dim) or Replicate()"
        )
    return layout


def _checked_sizes(
    parts: tuple[int, ...], dim: int, shape: Sequence[int], layout: Layout, mesh: MeshSpec, what: str
) -> tuple[int, ...]:
    count = mesh.size(*layout.dims[dim])
    if len(parts) != count:
        axes = ", ".join(map(repr, layout.dims[dim])) or "no axis"
        raise ShardingError(
            f"sizes[{dim}] has {len(parts)} parts {list(parts)}; dim {dim} of {what} is split over {axes}, "
            f"into {count}\n  try: one size per part, or a placement that splits the dim"
        )
    if min(parts) < 0 or sum(parts) != shape[dim]:
        raise ShardingError(
            f"sizes[{dim}] = {list(parts)} adds up to {sum(parts)}; dim {dim} of {what} is {shape[dim]} long\n"
            "  try: sizes >= 0 that add up to the length of the dim"
        )
    return parts


def spans_of(layout: Layout, shape: Sequence[int], mesh: MeshSpec, rank: int) -> tuple[Span, ...]:
    """The span of every dim that `rank` holds, in global coordinates."""
    return tuple(layout.interval(shape, mesh, dim, rank) for dim in range(len(shape)))


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


@dataclass(eq=False)
class PartSampler(Sampler[BatchPart]):
    """One rank's part of every batch of an epoch, from batch `start` on.

    The batches joined over the ranks are those of a single process: consecutive runs of batch_size in one
    order of all samples, a permutation by torch's generator seeded with seed + epoch. No sample is
    repeated or padded, and every rank has as many batches. Iterated in the main process only.

    length: of the dataset. index: of this rank among those that split the batch.
    """

    length: int
    split: BatchSplit
    index: int
    shuffle: bool
    seed: int
    drop_last: bool
    epoch: int = 0
    start: int = 0

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


def batch_axes(placements: Any, mesh: MeshSpec, sizes: Sizes | None, batch_size: int) -> tuple[str, ...]:
    """The axes that split dim 0 of every tensor of a batch, major first.

    Raises ShardingError for tensors that differ in them, a Partial, a dim counted from the end, or sizes
    of dim 0 that do not add up to `batch_size` or of a dim that no tensor splits.
    """
    checked_count(batch_size, "batch_size", least=1)
    layouts = [
        _open_layout(leaf, mesh, f"placements[{i}]")
        for i, leaf in enumerate(placement_leaves(placements, mesh, argument="placements"))
    ]
    found = [layout.dims[0] for layout in layouts]
    if len(set(found)) != 1:
        raise ShardingError(
            f"placements split dim 0 of a batch's tensors over different axes: {[list(a) for a in found]}\n"
            "  all tensors of a batch come from the same samples\n"
            "  try: Shard(0) on the same axes for every tensor, None for none"
        )
    split = {dim for layout in layouts for dim, axes in enumerate(layout.dims) if axes}
    unused = sorted(set(sizes or {}) - split)
    if unused:
        raise ShardingError(
            f"sizes has dim {unused[0]}, which no tensor of a batch is split in\n"
            "  try: dims that placements split, counted from the batch's dim 0"
        )
    if sizes and 0 in sizes:
        sized(Layout((found[0],)), (batch_size,), mesh, {0: sizes[0]}, "a batch")
    return found[0]


def inner_spans(
    placements: Any, batch: Any, mesh: MeshSpec, rank: int, sizes: Sizes | None
) -> list[tuple[Span, ...]]:
    """Per tensor of a batch, in pytree order, what `rank` holds of every dim but the first.

    batch: a tensor, tuple, list or dict of tensors; of their shapes dim 0 is not read.
    Raises ShardingError for another batch, or placements and sizes that do not fit it.
    """
    if not isinstance(batch, (torch.Tensor, Mapping, tuple, list)):
        raise ShardingError(
            f"a batch is {type_of(batch)}\n  try: a collate_fn that makes a tensor, tuple or dict"
        )
    names, tensors = leaf_names(*as_call(batch))
    given = matched_placements(placements, names, mesh, argument="placements")
    spans: list[tuple[Span, ...]] = []
    for i, tensor in enumerate(tensors):
        shape, what = tuple(tensor.shape), f"{names[i]} of a batch"
        layout = Layout.replicated(len(shape))
        leaf = given.get(i)
        if leaf is not None:
            layout = placements_to_layout(leaf, shape, mesh, what=what)
        inner = {d: parts for d, parts in (sizes or {}).items() if 0 < d < len(shape) and layout.dims[d]}
        spans.append(spans_of(sized(layout, shape, mesh, inner, what), shape, mesh, rank)[1:])
    return spans


def _open_layout(leaf: Sequence[Placement] | None, mesh: MeshSpec, what: str) -> Layout:
    """The layout of a tensor of as many dims as `leaf` speaks of, at least one."""
    if leaf is None:
        return Layout.replicated(1)
    dims = [getattr(placement, "dim", 0) for placement in leaf]
    if min(dims) < 0:
        raise ShardingError(
            f"{what} splits dim {min(dims)}, counted from the end; a batch's tensors may differ in their dims\n"
            "  try: count from 0, the dim of the samples"
        )
    return refuse_partial(placements_to_layout(leaf, (1,) * (1 + max(dims)), mesh, what=what), what)
