"""What pieces on ranks may be of a value in one process: copies, parts of its dims, or summands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.verification.part_errors import largest, relative_error
from cost_model.mesh import MeshSpec
from passes.layout.layout import Span, nested_spans

Index = tuple[slice | torch.Tensor, ...]
_Way = int | str | tuple[str, int]
"""A dim of which pieces are parts, or what else they are; ("ends", dim): each rank has a part from the front of a dim
and one from its back, as causal attention is divided evenly."""


@dataclass(frozen=True)
class MeanAxes:
    """Over which gradients are means. batch: each rank has its rows; sequence: the code divides sequences."""

    batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    @property
    def both(self) -> tuple[str, ...]:
        return self.batch + self.sequence


def joined_errors(
    pieces: Sequence[torch.Tensor], expected: torch.Tensor, mesh: MeshSpec, means: MeanAxes
) -> Iterator[float]:
    """Errors of every way in which the ranks' pieces may be one value: along each axis copies, parts of a dim or
    summands; along those of `means` also what a mean is of, as a loss of each rank's rows."""
    scale, dims = largest([expected]), range(expected.ndim)

    def ways(axis: str) -> Iterator[_Way]:
        yield from ("copies", "sum", *dims)
        yield from ("mean",) if axis in means.both else ()
        yield from (("ends", dim) for dim in dims if axis in means.sequence)

    for chosen in itertools.product(*map(ways, mesh.names)):
        joined = _joined(list(pieces), chosen, mesh, expected.shape)
        if joined is not None and all(one.shape == expected.shape for one in joined):
            yield max(relative_error(one, expected, scale) for one in joined)


def _joined(
    pieces: list[torch.Tensor], ways: Sequence[_Way], mesh: MeshSpec, shape: torch.Size
) -> list[torch.Tensor] | None:
    """All copies; None for parts that do not fit. From the last axis on, as it splits the parts of those before."""
    copies = [pieces]
    for size, way in zip(reversed(mesh.sizes), reversed(ways), strict=True):
        merged: list[list[torch.Tensor]] = []
        for row in copies:
            groups = [row[i : i + size] for i in range(0, len(row), size)]
            if way == "copies":
                merged += [list(one) for one in zip(*groups, strict=True)]
                continue
            if isinstance(way, int) and sum(one.shape[way] for one in groups[0]) > shape[way]:
                return None
            try:
                merged.append([_merged(one, way) for one in groups])
            except (RuntimeError, IndexError):  # of other shapes
                return None
        copies = merged
    return [row[0] for row in copies]


def _merged(pieces: list[torch.Tensor], way: _Way) -> torch.Tensor:
    if isinstance(way, int):
        return torch.cat(pieces, way)
    if isinstance(way, tuple):
        fronts, backs = zip(*(one.tensor_split(2, way[1]) for one in pieces), strict=True)
        return torch.cat([*fronts, *reversed(backs)], way[1])
    total: torch.Tensor = sum(pieces)  # type: ignore[assignment]
    return total / len(pieces) if way == "mean" else total


def parts_of(
    shape: torch.Size, whole: torch.Size, mesh: MeshSpec, rank: int, means: MeanAxes
) -> Iterator[tuple[Mapping[str, int], Index]]:
    """Every way in which a rank's piece of such a shape is a part of the whole: which axes split which dims, and where
    it lies. Those of the fewest axes first, and with rows over axes of the batch."""
    if len(shape) != len(whole):
        return
    dims = [None, *(d for d in range(len(whole)) if shape[d] != whole[d])]
    found: list[tuple[Mapping[str, int], Index]] = []
    for chosen in itertools.product(dims, repeat=len(mesh.names)):
        split = {axis: d for axis, d in zip(mesh.names, chosen, strict=True) if d is not None}
        spans = [
            _span(length, [a for a in split if split[a] == d], mesh, rank) for d, length in enumerate(whole)
        ]
        if [hi - lo for lo, hi in spans] == list(shape):
            index = tuple(slice(*span) for span in spans)
            found.append((split, index))
            for axis in means.sequence:
                d = split.get(axis)
                if d is not None and list(split.values()).count(d) == 1:
                    parts = torch.arange(whole[d]).tensor_split(2 * mesh.size(axis))
                    own = mesh.linear_index(rank, [axis])
                    found.append(
                        (split, (*index[:d], torch.cat([parts[own], parts[-1 - own]]), *index[d + 1 :]))
                    )
    yield from sorted(
        found, key=lambda one: (len(one[0]), -sum(one[0].get(axis) == 0 for axis in means.batch))
    )


def _span(length: int, axes: Sequence[str], mesh: MeshSpec, rank: int) -> Span:
    """Where the rank's part of a dim begins and ends. axes: that split it, in the mesh's order."""
    return nested_spans(length, tuple(map(mesh.size, axes)))[mesh.linear_index(rank, axes)]


def place_by_values(
    piece: torch.Tensor, whole: torch.Tensor, mesh: MeshSpec, rank: int
) -> tuple[Index, bool] | None:
    """Where a rank's piece lies in the whole, as its numbers say, and whether that is in its order: of queries, keys
    and values in one matrix a rank has a part of each. None: nowhere."""
    whole = whole.to(piece.dtype)
    for _, index in parts_of(piece.shape, whole.shape, mesh, rank, MeanAxes()):
        if torch.equal(whole[index], piece):
            return index, True
    dims = [d for d in range(whole.ndim) if piece.ndim == whole.ndim and piece.shape[d] != whole.shape[d]]
    if len(dims) != 1:
        return None
    places = {row: i for i, row in enumerate(_rows(whole, dims[0]))}
    found = [places.get(row, -1) for row in _rows(piece, dims[0])]
    if -1 in found:
        return None
    return (*[slice(None)] * dims[0], torch.tensor(found, device=piece.device)), False


def _rows(value: torch.Tensor, dim: int) -> Iterator[bytes]:
    rows = value.movedim(dim, 0).reshape(value.shape[dim], -1).contiguous().cpu()
    return (row.tobytes() for row in rows.view(torch.uint8).numpy())
