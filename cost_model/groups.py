"""Where the ranks of a communication group sit: strides on the mesh, and use of every link level."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.errors import ProfileError
from cost_model.mesh import MeshSpec

GroupShape = tuple[tuple[int, int], ...]
"""(ranks, stride) pairs, largest stride first, as short as possible: 8 adjacent ranks are ((8, 1),), 4
ranks one node of 8 apart are ((4, 8),). () is a group of one rank."""


def group_shape(mesh: MeshSpec, axes: Sequence[str]) -> GroupShape:
    """Shape of the groups along `axes` (in any order: the price of a group does not depend on it).

    Axes that continue each other merge: ("dp", "tp") of a 4 x 8 mesh is ((32, 1),).
    Raises ShardingError for an unknown axis.
    """
    pairs = sorted(((mesh.stride(a), mesh.size(a)) for a in axes if mesh.size(a) > 1), reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, size in pairs:
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def shape_text(shape: GroupShape) -> str:
    """((4, 8),) -> "4 ranks, stride 8"."""
    return " x ".join(f"{ranks} ranks, stride {stride}" for ranks, stride in shape)


def group_ranks(shape: GroupShape, base: int = 0) -> tuple[int, ...]:
    """The ranks of the group of this shape whose smallest rank is `base`, ascending."""
    steps = [range(0, ranks * stride, stride) for ranks, stride in shape]
    return tuple(base + sum(offsets) for offsets in itertools.product(*steps))


@dataclass(frozen=True)
class LevelUse:
    """How a group uses one link level.

    level: index of the level in the profile's links.
    hops:  steps over this level when a chain visits every rank of the group once.
    depth: hops inside the fullest single domain of this level.
    lanes: ranks of the group inside the emptiest unit (rank at level 0, domain of the next inner
           level otherwise) that this level joins: that many ports carry the group's traffic at once.
    """

    level: int
    hops: int
    depth: int
    lanes: int


@dataclass(frozen=True)
class Occupancy:
    """Number of ranks of a group and the link levels it uses, inner first."""

    ranks: int
    uses: tuple[LevelUse, ...]


def occupancy(ranks: Sequence[int], domains: Sequence[int | None]) -> Occupancy:
    """Which levels a group of `ranks` uses, where level i joins `domains[i]` consecutive ranks.

        occupancy(range(16), (8, None)): 14 hops inside nodes (7 deep), 1 between with 8 lanes

    Raises ProfileError when the outermost level does not reach all of `ranks`.
    """
    units = np.asarray(ranks, dtype=np.int64)
    places = units
    uses: list[LevelUse] = []
    for level, size in enumerate(domains):
        inner, first, members = np.unique(units, return_index=True, return_counts=True)
        units = np.zeros_like(places) if size is None else places // size
        _, joined = np.unique(units[first], return_counts=True)
        hops = len(inner) - len(joined)
        if hops:
            uses.append(LevelUse(level, hops, int(joined.max()) - 1, int(members.min())))
    if len(np.unique(units)) > 1:
        raise ProfileError(
            f"the profile's links join at most {domains[-1]} consecutive ranks; "
            f"a group holds ranks {min(ranks)} and {max(ranks)}\n"
            "  try: a profile with a level for the network between nodes"
        )
    return Occupancy(len(places), tuple(uses))


def mesh_occupancies(
    mesh: MeshSpec, axes: Sequence[str], domains: Sequence[int | None]
) -> frozenset[Occupancy]:
    """The distinct occupancies of all groups along `axes`: one, unless nodes and groups do not align."""
    shape = group_shape(mesh, axes)
    period = math.lcm(*(size for size in domains if size is not None))
    rest = [a for a in mesh.names if a not in axes]
    bases = np.zeros(1, dtype=np.int64)
    for axis in rest:
        steps = np.arange(mesh.size(axis), dtype=np.int64) * mesh.stride(axis)
        bases = np.add.outer(bases, steps).ravel()
    # Moving a group by a whole period moves it to other nodes and changes nothing else.
    _, first = np.unique(bases % period, return_index=True)
    return frozenset(occupancy(group_ranks(shape, int(bases[i])), domains) for i in first)


def shapes_of(spec: MeshSpec) -> dict[GroupShape, tuple[str, ...]]:
    """Every distinct shape -> the axes that make it, in mesh order. If several sets of axes do, the smallest counts."""
    axes = spec.real_axes()
    found: dict[GroupShape, tuple[str, ...]] = {}
    for count in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            found.setdefault(group_shape(spec, chosen), chosen)
    return found
