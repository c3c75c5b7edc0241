"""What a profile holds: link levels, measured collective times, and rates of one device; and measured curves, with
their medians and spread, made never falling, and interpolated."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
from msgspec import Meta

from cost_model.mesh import MOST_DEVICES

CollectiveKind = Literal[
    "all_gather", "all_reduce", "all_to_all", "broadcast", "point_to_point", "reduce_scatter"
]
"""Every collective that has a price. What `nbytes` means for each is in `cost_model.collectives`."""

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)

PLAN_KINDS = tuple(kind for kind in KINDS if kind != "broadcast")
"""The kinds that plans emit: only these are measured. Other benchmarks, and older profiles, hold broadcasts too."""

MEMORY_KINDS: tuple[CollectiveKind, ...] = ("all_gather", "all_reduce", "reduce_scatter")
"""Those that CPU ranks of one host run through memory that they share. Each is waited for where it starts."""

KernelKind = Literal["matmul", "convolution", "attention", "pooling", "narrow_convolution"]
"""Kinds of ops whose work is counted in operations, each with its own rate: fields of `DeviceRates`."""

KERNEL_KINDS: tuple[KernelKind, ...] = get_args(KernelKind)


T = TypeVar("T")

Positive = Annotated[float, Meta(gt=1e-30, lt=1e30)]
"""No time, rate or size in a computer is outside these bounds. NaN is not inside. A profile's file is held against the
types of its fields (`cost_model.profile_record`)."""
_Size = Annotated[int, Meta(ge=1, le=2**62)]
_Spread = Annotated[float, Meta(ge=0.0, lt=1e30)]
_Ranks = Annotated[int, Meta(ge=2, le=MOST_DEVICES)]
_Stride = Annotated[int, Meta(ge=1, le=MOST_DEVICES)]


@dataclass(frozen=True)
class LinkLevel:
    """One level of the network, inner levels first: NVLink in a node, then InfiniBand between nodes.

    ranks:                 how many consecutive ranks this level joins (8 for a node of 8 GPUs);
                           None joins everything, and only the outermost level may say it.
    latency_seconds:       of one hop (one step of a ring) over this level.
    bytes_per_second:      what one rank reaches, each direction, *while every rank of the mesh is
                           sending*. With one network card per GPU that is the card's rate; where
                           ranks share a card it is their share of it.
    peak_bytes_per_second: the physical limit of the same. A measured time that would need more
                           is refused.
    reduced_bytes_per_second: bytes of an array over the seconds of its all-reduce, if the level's switches sum it on
                           its way (NVLink SHARP). None: the ranks sum it.
    shares_memory:         whether CPU ranks that it joins exchange data through memory (`measure.host_memory`), and no
                           library keeps copies of it.
    """

    name: str
    ranks: int | None
    latency_seconds: Positive
    bytes_per_second: Positive
    peak_bytes_per_second: Positive
    reduced_bytes_per_second: Positive | None = None
    shares_memory: bool = False


@dataclass(frozen=True)
class CollectiveSamples:
    """Measured times of one collective on one group shape, all such groups of the mesh at once.

    nbytes:  sizes, increasing, in the convention of `cost_model.collectives`.
    seconds: median time of each, not decreasing.
    spread:  interquartile range of the repetitions over their median, per size; () if unknown. No
             price depends on it: it says how far a repeated measurement may be off.
    """

    kind: Annotated[str, Meta(pattern=f"^({'|'.join(KINDS)})$")]
    group: Annotated[tuple[tuple[_Ranks, _Stride], ...], Meta(min_length=1)]
    nbytes: Annotated[tuple[_Size, ...], Meta(min_length=2)]
    seconds: tuple[Positive, ...]
    spread: tuple[_Spread, ...] = ()


@dataclass(frozen=True)
class MatmulRates:
    """Matrix-product rate of a dtype by size: `flops` (2 m n k) increasing, `flops_per_second` of each.

    spread: as in `CollectiveSamples`.
    """

    dtype: str
    flops: Annotated[tuple[Positive, ...], Meta(min_length=1)]
    flops_per_second: tuple[Positive, ...]
    spread: tuple[_Spread, ...] = ()


@dataclass(frozen=True)
class UpdateRates:
    """The optimizer's update of one parameter, measured with a fused AdamW: constant part, and bytes of parameter
    (not of gradient or state) per second. On GPUs, of one among others."""

    launch_seconds: Positive
    bytes_per_second: Positive


@dataclass(frozen=True)
class DeviceRates:
    """One device: kernel launch time, memory bandwidth (bytes read plus written), matrix products.

    convolution, attention, pooling (max-pooling, forward: comparisons): rates by operations of one op, as for
    products. A kind without rates has those of products. narrow_convolution: convolutions of few channels; without
    rates, those of convolutions. update: of the optimizer; None: computed from memory bandwidth.
    """

    launch_seconds: Positive
    memory_bytes_per_second: Positive
    matmul: Annotated[tuple[MatmulRates, ...], Meta(min_length=1)]
    convolution: tuple[MatmulRates, ...] = ()
    attention: tuple[MatmulRates, ...] = ()
    pooling: tuple[MatmulRates, ...] = ()
    narrow_convolution: tuple[MatmulRates, ...] = ()
    update: UpdateRates | None = None

    def rates(self, kind: KernelKind) -> tuple[MatmulRates, ...]:
        """The rates of one kind of kernel."""
        rates: tuple[MatmulRates, ...] = getattr(self, kind)
        return rates


@dataclass(frozen=True)
class Lateness:
    """How late the last rank of a group comes to a collective, by how long the ranks have computed since they last met;
    measured (`cost_model.measure.links`).

    computing_seconds: of computing since ranks last met, increasing. seconds: by how much longer a collective takes
    behind each than behind the first, which is what collectives are priced with; not falling, from 0 on.
    ranks: of the group that it was measured over; None: any group's.

    Linear between the points; 0 below the first, and beyond the last as at the last: nobody looked there.
    """

    computing_seconds: Annotated[tuple[Positive, ...], Meta(min_length=2)]
    seconds: tuple[_Spread, ...]
    ranks: int | None = None

    def after(self, computed: float, ranks: int) -> float:
        """Seconds by which a collective of `ranks` is longer that comes behind `computed` seconds of computing.

        Fewer ranks are less far apart, as the expected range of n values of one uniform distribution is (n - 1) /
        (n + 1) of its width   [order statistics]
        """
        share = 1.0 if self.ranks is None else _range(ranks) / _range(self.ranks)
        return share * float(np.interp(computed, self.computing_seconds, self.seconds, left=0.0))

    def mistake(self) -> str | None:
        """What is wrong with it, if anything is."""
        if len(self.computing_seconds) != len(self.seconds):
            return "needs a time for each time of computing"
        if any(now <= before for before, now in itertools.pairwise(self.computing_seconds)):
            return "needs increasing times of computing"
        if any(now < before for before, now in itertools.pairwise(self.seconds)):
            return "says that ranks come earlier behind more computing"
        if self.ranks is not None and self.ranks < 2:
            return "needs two ranks at least"
        return None


def _range(ranks: int) -> float:
    return (ranks - 1) / (ranks + 1)


def paced(value: T, pace: float) -> T:
    """`value`, a profile, timed prices or a part of them, with all seconds times `pace` and all rates a second over it:
    whatever is priced by it takes exactly that many times as long, so no plan is another for it."""
    assert pace > 0.0, pace
    if pace == 1.0:
        return value
    if isinstance(value, tuple):
        return tuple(paced(one, pace) for one in value)  # type: ignore[return-value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{f.name: _paced(f.name, getattr(value, f.name), pace) for f in fields(value)})


def _paced(name: str, held: Any, pace: float) -> Any:
    """A field of that name."""
    if held is None or not name.endswith(("seconds", "per_second")):
        return paced(held, pace)
    # Rounding makes no measured time one that the peak forbids.
    more = 1.0 + 1e-9 if name == "peak_bytes_per_second" else 1.0
    change = (lambda x: pace * x) if name.endswith("seconds") else (lambda x: x / pace * more)
    return tuple(map(change, held)) if isinstance(held, tuple) else change(held)


@dataclass(frozen=True)
class SampledCurve:
    """Times by size.

    medians:  of the repetitions, as they came.
    spread:   interquartile range over median.
    seconds:  the medians made never falling, for a profile.
    """

    sizes: tuple[int, ...]
    medians: tuple[float, ...]
    spread: tuple[float, ...]
    seconds: tuple[float, ...]


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> float:
    """Interquartile range over median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def monotone(values: Sequence[float]) -> list[float]:
    """`pooled` of single values.   [1, 3, 2, 5] -> [1, 2.5, 2.5, 5]"""
    return pooled([[value] for value in values])


def pooled(
    repeated: Sequence[Sequence[float]], middle: Callable[[Sequence[float]], float] = median
) -> list[float]:
    """Middles of each group of values, never falling. Groups of a falling run are pooled, and get the middle of all.

        [[1], [3, 3, 9], [2], [5]] -> [1, 3, 3, 5]

    A larger buffer that took less time is noise. With medians the result is the never falling sequence nearest to all
    given values in the sum of distances, where one wild value moves nothing; with means in the sum of their squares.
    [pool adjacent violators: Barlow et al. 1972]
    """
    blocks: list[tuple[list[float], int]] = []  # values, groups
    for values in repeated:
        block, groups = list(values), 1
        while blocks and middle(blocks[-1][0]) > middle(block):
            before, count = blocks.pop()
            block, groups = before + block, count + groups
        blocks.append((block, groups))
    return [one for block, groups in blocks for one in [middle(block)] * groups]


def curve(samples: dict[int, list[float]]) -> SampledCurve:
    """size -> repeated seconds."""
    sizes = tuple(sorted(samples))
    return SampledCurve(
        sizes,
        tuple(median(samples[size]) for size in sizes),
        tuple(round(spread(samples[size]), 4) for size in sizes),
        tuple(pooled([samples[size] for size in sizes])),
    )


class Curve:
    """y(x) through measured points; `curve(x)` evaluates it.

    Between two points log y is linear in log x, which is exact for a power law and keeps y / x
    between its values at the two points: an interpolated price cannot beat a bandwidth that both
    measurements respect. Outside, y continues as a straight line with the given slopes:

        x < xs[0]:   y = ys[0] - slope_below * (xs[0] - x)
        x > xs[-1]:  y = ys[-1] + slope_above * (x - xs[-1])

    `xs` positive and increasing, `ys` positive and not decreasing, 0 <= slope_below <= ys[0] / xs[0],
    slope_above >= 0. Then y is monotone and not negative for x >= 0.
    """

    __slots__ = ("_exponents", "_slope_above", "_slope_below", "_xs", "_ys")

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], slope_below: float, slope_above: float
    ) -> None:
        assert len(xs) == len(ys) >= 1, (xs, ys)
        assert 0.0 <= slope_below <= ys[0] / xs[0] * (1 + 1e-12), "the line below would become negative"
        assert slope_above >= 0.0, slope_above
        self._xs = tuple(float(x) for x in xs)
        self._ys = tuple(float(y) for y in ys)
        self._slope_below = slope_below
        self._slope_above = slope_above
        self._exponents = tuple(
            math.log(self._ys[i + 1] / self._ys[i]) / math.log(self._xs[i + 1] / self._xs[i])
            for i in range(len(self._xs) - 1)
        )

    def __call__(self, x: float) -> float:
        xs = self._xs
        if x < xs[0]:
            return max(0.0, self._ys[0] - self._slope_below * (xs[0] - x))
        if x >= xs[-1]:
            return self._ys[-1] + self._slope_above * (x - xs[-1])
        i = bisect_right(xs, x) - 1
        return self._ys[i] * (x / xs[i]) ** self._exponents[i]
