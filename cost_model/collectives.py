"""Seconds of one collective on one group of a mesh: `CollectivePrices`.

`nbytes` is the size of *one rank's* largest buffer:

| kind           | nbytes                                              |
| all_gather     | the gathered result                                 |
| reduce_scatter | the input, before it is scattered                   |
| all_reduce     | the array                                           |
| all_to_all     | the input of one rank                               |
| broadcast      | the array                                           |
| point_to_point | what each rank sends to its neighbours in the group |

All groups along the axes are taken to communicate at the same time, as they do in a sharded program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

from cost_model.compute import ComputePrices
from cost_model.groups import (
    GroupShape,
    Line,
    Occupancy,
    check_kind,
    floor_slope,
    group_shape,
    mesh_occupancies,
    model_lines,
)
from cost_model.measurements import CollectiveSamples, Curve
from cost_model.mesh import MeshSpec
from cost_model.profile_record import ProfileRecord

Price = Callable[[float], float]
"""nbytes -> seconds."""

Confidence = Literal["measured", "extrapolated", "modelled", "nominal"]
"""Where a price comes from. Everything but "measured" is low confidence.

measured      this kind on this group shape, at sizes around this one
extrapolated  measured, but beyond the measured sizes
modelled      from the profile's link levels; this group was not measured
nominal       the profile is not of the user's machine
"""


class CollectivePrices:
    """Prices of every collective on `mesh` under `profile`, resolved once per (kind, axes).

        prices = CollectivePrices(Profile.named("h100"), MeshSpec({"dp": 32, "tp": 8}))
        prices.seconds("all_reduce", ("tp",), 2**20)

    A measured group is priced from its measured curve. Any other group is priced by the link model. That price is
    held between the measured prices of the same stride with fewer and with more ranks. Prices never fall with bytes.
    They never fall with ranks at one stride either, as long as every node holds the same number of the group's ranks.
    """

    def __init__(self, profile: ProfileRecord, mesh: MeshSpec) -> None:
        self.profile = profile
        self.mesh = mesh
        self._prices: dict[tuple[str, tuple[str, ...]], Price] = {}
        self._shared: dict[tuple[str, ...], bool] = {}

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: float) -> float:
        """Price of `kind` over the groups along `axes`; 0 for a group of one rank.

        `axes` is a tuple, in any order. Raises UnsupportedOpError for an unknown kind, ShardingError
        for an unknown axis, ProfileError if the profile's links do not reach the whole group.
        """
        price = self._prices.get((kind, axes))
        if price is None:
            price = self.price(kind, axes)
        return price(nbytes)

    def price(self, kind: str, axes: tuple[str, ...]) -> Price:
        """The function nbytes -> seconds itself, for loops; same errors as `seconds`."""
        price = self._prices.get((kind, axes))
        if price is None:
            price = self._prices[kind, axes] = _resolve(self.profile, self.mesh, kind, tuple(sorted(axes)))
        return price

    def shares_memory(self, axes: tuple[str, ...]) -> bool:
        """Whether every group along `axes` exchanges its data through memory of its host."""
        if axes not in self._shared:
            links = self.profile.links
            groups = mesh_occupancies(self.mesh, axes, self.profile.link_domains)
            self._shared[axes] = all(links[use.level].shares_memory for group in groups for use in group.uses)
        return self._shared[axes]

    def link(self, axes: tuple[str, ...]) -> int:
        """The link that the groups along `axes` communicate over: 0 within hosts, 1 where one leaves its host.

        GPUs have other ports for either, and NCCL a stream for each communicator, so both run side by side [PyTorch
        `ProcessGroupNCCL`, a stream for each group]. On CPUs the processor moves the bytes of both: one link.
        """
        if self.profile.device_type == "cpu" or len(self.profile.links) == 1:
            return 0
        groups = mesh_occupancies(self.mesh, axes, self.profile.link_domains)
        return int(any(use.level > 0 for group in groups for use in group.uses))

    def confidence(self, kind: str, axes: tuple[str, ...], nbytes: float | None = None) -> Confidence | None:
        """How far to trust `seconds`; None for a group of one rank, whose price 0 is exact."""
        check_kind(kind)
        shape = group_shape(self.mesh, axes)
        if not shape:
            return None
        if self.profile.nominal:
            return "nominal"
        samples = _samples(self.profile, kind).get(shape)
        if samples is None:
            return "modelled"
        inside = nbytes is None or samples.nbytes[0] <= nbytes <= samples.nbytes[-1]
        return "measured" if inside else "extrapolated"


def _resolve(profile: ProfileRecord, mesh: MeshSpec, kind: str, axes: tuple[str, ...]) -> Price:
    """The price function of `kind` along `axes`."""
    check_kind(kind)
    assert len(set(axes)) == len(axes), f"an axis is used twice: {axes}"
    shape = group_shape(mesh, axes)
    if not shape:
        return lambda nbytes: 0.0
    groups = mesh_occupancies(mesh, axes, profile.link_domains)
    slope = max(floor_slope(kind, group, profile.links) for group in groups)
    measured = _samples(profile, kind)
    own = measured.get(shape)
    price = _model(profile, kind, groups) if own is None else _measured(own, slope)
    return _between(price, measured, shape, slope, cap=own is None)


def _samples(profile: ProfileRecord, kind: str) -> dict[GroupShape, CollectiveSamples]:
    return {samples.group: samples for samples in profile.collectives if samples.kind == kind}


def _model(profile: ProfileRecord, kind: str, groups: frozenset[Occupancy]) -> Price:
    """The slowest of the groups decides, because all groups meet at the next collective."""
    launch = profile.collective_launch_seconds
    return _picked(max, [_picked(min, model_lines(kind, group, profile.links, launch)) for group in groups])


def _measured(samples: CollectiveSamples, floor: float) -> Price:
    """The measured curve, and outside the measured sizes alpha + beta * nbytes.

    beta comes from the two nearest points. Below them it is at most what reaches 0 at 0 bytes. Above them it is at
    least `floor`, the seconds per byte at the links' peak.
    """
    sizes, times = samples.nbytes, samples.seconds
    below = min((times[1] - times[0]) / (sizes[1] - sizes[0]), times[0] / sizes[0])
    above = max((times[-1] - times[-2]) / (sizes[-1] - sizes[-2]), floor)
    return Curve(sizes, times, below, above)


def _between(
    price: Price, measured: dict[GroupShape, CollectiveSamples], shape: GroupShape, floor: float, cap: bool
) -> Price:
    """Hold `price` above what fewer ranks at the same stride took and, if `cap`, below what more took.

    Only for groups of one stride; several strides have no order.
    """
    if len(shape) != 1:
        return price
    ((ranks, stride),) = shape
    along = {s[0][0]: _measured(v, floor) for s, v in measured.items() if len(s) == 1 and s[0][1] == stride}
    fewer = [along[n] for n in along if n < ranks]
    more = min((n for n in along if n > ranks), default=None)
    if cap and more is not None:
        price = _picked(min, [price, _picked(max, [*fewer, along[more]])])
    return _picked(max, [*fewer, price])


def _picked(pick: Callable[[list[float]], float], prices: Sequence[Price] | Sequence[Line]) -> Price:
    """pick: `min` or `max` of what they say."""
    options = tuple(prices)
    return options[0] if len(options) == 1 else lambda nbytes: pick([option(nbytes) for option in options])


START_SHARE = 0.1
"""A share of a collective's time. A bucket is large enough if starting it takes less than this share."""

MERGED = ("all_gather", "all_reduce", "reduce_scatter")
"""The kinds that can share a buffer."""

_SIZES = tuple(2**k for k in range(8, 31))

Seconds = Callable[[str, tuple[str, ...], int], float]


class BucketedPrices:
    """`seconds` of one collective as a part of a full bucket.

    A bucket of `limit` bytes takes t = price(limit). A part of n < limit bytes is charged n / limit of t, which is
    less than price(n) because the parts share one start, and its copies into the bucket and out of it. A larger
    collective fills a bucket alone. Kinds that are not merged (`MERGED`) keep their price. The price leaves out
    that the last bucket of a phase is not full.
    """

    def __init__(self, price: Seconds, mesh: MeshSpec, compute: ComputePrices) -> None:
        self._price = price
        self._mesh = mesh
        self._compute = compute
        self._limits: dict[tuple[str, tuple[str, ...]], int] = {}

    def seconds(self, kind: str, axes: tuple[str, ...], nbytes: int) -> float:
        alone = self._price(kind, axes, nbytes)
        if kind not in MERGED:
            return alone
        limit = self.limit(kind, axes)
        if nbytes >= limit:
            return alone
        share = self._price(kind, axes, limit) * nbytes / limit
        copies = copies_seconds(self._compute, kind, self._mesh.size(*axes), nbytes, 1) if nbytes else 0.0
        return min(alone, share + copies)

    def limit(self, kind: str, axes: tuple[str, ...]) -> int:
        """Bytes of a full bucket: starting it takes no more than `START_SHARE`.

        The start is what merging two collectives of a size saves, 2 seconds(n) - seconds(2 n). It is the median over
        the sizes at which it matters: the smallest measured sizes say little about larger ones, and sizes that take
        long for their bytes say nothing of the start.
        """
        if (kind, axes) not in self._limits:
            seconds = {nbytes: self._price(kind, axes, nbytes) for nbytes in _SIZES}
            saved = ((2 * seconds[n] - seconds[2 * n], seconds[n]) for n in _SIZES[:-1])
            start = median([s for s, one in saved if s >= START_SHARE * one] or [0.0])
            enough = (n for n in _SIZES if START_SHARE * seconds[n] >= start)
            self._limits[kind, axes] = next(enough, _SIZES[-1])
        return self._limits[kind, axes]


def copies_seconds(compute: ComputePrices, kind: str, ranks: int, nbytes: int, count: int) -> float:
    """Seconds to copy `count` tensors into a bucket of `nbytes` over `ranks` and, if they are gathered, out of it.
    Each copy reads and writes. One kernel fills the bucket and is not counted here; one kernel a tensor empties it."""
    if kind == "all_gather":
        return count * compute.launch_seconds + compute.memory_seconds(2 * nbytes + 2 * nbytes / ranks)
    return compute.memory_seconds(2 * nbytes)
