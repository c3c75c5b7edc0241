"""Where the ranks of a communication group sit: strides on the mesh, and use of every link level; and what a collective
on them costs by the latency and bandwidth of the links alone.

Every model is a set of straight lines `seconds = alpha + beta * nbytes`; the price is the lowest of them
(the communication library picks its best algorithm). What `nbytes` means: `cost_model.collectives`.

Written S = nbytes, n = ranks of the group, and for each level i that the group uses: h_i hops, of them
d_i deep in one domain, m_i lanes, a_i latency, B_i bytes per second of one rank's port (`LevelUse`,
`cost_model.measurements`).

A ring passes through every rank of a unit, so with m_i ranks in the emptiest unit NCCL builds m_i rings
that leave it through m_i ports: level i carries the ring's traffic at m_i * B_i, and the slowest level
decides. The steps take sum(h_i * a_i). [NCCL src/graph/tuning.cc: steps inside and between nodes;
nccl-tests doc/PERFORMANCE.md: bytes over a link]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.errors import ProfileError, UnsupportedOpError
from cost_model.measurements import KINDS, LinkLevel
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


@dataclass(frozen=True)
class Line:
    """seconds = alpha + beta * nbytes; alpha in seconds, beta in seconds per byte."""

    alpha: float
    beta: float

    def __call__(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes


Model = Callable[[Occupancy, Sequence[LinkLevel]], tuple[Line, ...]]


def check_kind(kind: str) -> None:
    """UnsupportedOpError for a collective that has no price. Nothing is ever priced at zero by default."""
    if kind not in KINDS:
        raise UnsupportedOpError(
            f"no price for collective {kind!r}\n  the priced collectives are {', '.join(KINDS)}"
        )


def model_lines(kind: str, group: Occupancy, links: Sequence[LinkLevel], launch: float) -> tuple[Line, ...]:
    """The lines whose minimum prices `kind` on `group`; `launch` seconds are added to each."""
    check_kind(kind)
    assert group.ranks > 1, "a group of one rank does not communicate"
    return tuple(Line(launch + line.alpha, line.beta) for line in _MODELS[kind](group, links))


def floor_slope(kind: str, group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """Seconds per byte below which `kind` is physically impossible, whatever the algorithm.

    A unit that holds m of the n ranks must receive what it does not have through its m ports at peak
    rate P: (n - m) / n * S of a gathered, scattered or exchanged array, S of a broadcast one. An
    all-reduce gets S: switches that reduce (NVLink SHARP) need only that. Half of the
    messages to neighbours may come from either side, through two ports where the unit holds two of the ranks.
    """
    check_kind(kind)
    return max(
        _floor_bytes(kind, group.ranks, use.lanes) / links[use.level].peak_bytes_per_second
        for use in group.uses
    )


def _floor_bytes(kind: str, n: int, m: int) -> float:
    """Bytes through one port, per byte of `nbytes`."""
    if kind in ("all_gather", "reduce_scatter"):
        return (n - m) / n / m
    if kind == "all_to_all":
        return (n - m) / n
    if kind == "point_to_point":
        return 1.0 / min(m, 2)
    return 1.0 / m


def _ring_latency(group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """sum(h_i * a_i): one trip that visits every rank."""
    return sum(use.hops * links[use.level].latency_seconds for use in group.uses)


def _ring_seconds_per_byte(group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """max(1 / (m_i * B_i)): for each byte that a ring passes on."""
    return max(1.0 / (use.lanes * links[use.level].bytes_per_second) for use in group.uses)


def _ring_share(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Ring all-gather or reduce-scatter: t = sum(h_i * a_i) + (n-1)/n * S * max(1 / (m_i * B_i)).

    Each rank passes on (n-1)/n of the whole array, in n-1 steps.
    """
    share = (group.ranks - 1) / group.ranks
    return (Line(_ring_latency(group, links), share * _ring_seconds_per_byte(group, links)),)


def _all_reduce(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """The best of a ring, a tree and, inside one level whose switches sum, those.

    Ring: reduce-scatter then all-gather, t = 2 * sum(h_i * a_i) + 2(n-1)/n * S * max(1 / (m_i * B_i)).
    Tree: a chain of d_0 hops inside a node, binary between nodes, up and down, the whole array each way:
    t = 2 * (d_0 * a_0 + sum_{i>0} ceil(log2(d_i + 1)) * a_i) + 2 * S * max(1 / (m_i * B_i)).
    Switches: each rank sends its array to them and receives the sum, t = 2 * a_i + S / R_i, with R_i the level's
    `reduced_bytes_per_second`. [NVIDIA/nccl-tests issue 212]
    """
    (share,) = _ring_share(group, links)
    ring = Line(2.0 * share.alpha, 2.0 * share.beta)
    tree = Line(2.0 * _tree_latency(group, links), 2.0 * _ring_seconds_per_byte(group, links))
    return ring, tree, *_in_switches(group, links)


def _in_switches(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """None for a group that leaves the domain of its switches: NCCL's NVLS trees are not modelled."""
    use, *others = group.uses
    if others:
        return ()
    link = links[use.level]
    rate = link.reduced_bytes_per_second
    return () if rate is None else (Line(2.0 * link.latency_seconds, 1.0 / rate),)


def _tree_latency(group: Occupancy, links: Sequence[LinkLevel]) -> float:
    """Depth of the tree in seconds: d_0 * a_0 + sum_{i>0} ceil(log2(d_i + 1)) * a_i."""
    steps = (use.depth if use.level == 0 else math.ceil(math.log2(use.depth + 1)) for use in group.uses)
    return sum(step * links[use.level].latency_seconds for step, use in zip(steps, group.uses, strict=True))


def _all_to_all(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Direct exchange: t = sum(d_i * a_i) + S * max((n - m_i) / n / B_i).

    Each rank sends S/n to every other; (n - m_i) / n of its buffer leaves its unit, through its own
    port. Messages to the ranks of one domain are posted together, hence one latency for each.
    """
    n = group.ranks
    latency = sum(use.depth * links[use.level].latency_seconds for use in group.uses)
    slope = max((n - use.lanes) / n / links[use.level].bytes_per_second for use in group.uses)
    return (Line(latency, slope),)


def _broadcast(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Pipelined rings: t = sum(h_i * a_i) + S * max(1 / (m_i * B_i)). Every link carries all of S once."""
    return (Line(_ring_latency(group, links), _ring_seconds_per_byte(group, links)),)


def _point_to_point(group: Occupancy, links: Sequence[LinkLevel]) -> tuple[Line, ...]:
    """Every rank sends S to its neighbour in the group: t = max(a_i) + S * max(1 / B_i), the worst pair."""
    used = [links[use.level] for use in group.uses]
    latency = max(link.latency_seconds for link in used)
    return (Line(latency, max(1.0 / link.bytes_per_second for link in used)),)


_MODELS: dict[str, Model] = {
    "all_gather": _ring_share,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "point_to_point": _point_to_point,
    "reduce_scatter": _ring_share,
}
assert set(_MODELS) == set(KINDS)
