"""Does a profile still hold? Measure a few of its points again and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.groups import shapes_of
from cost_model.measure.clock import Clock
from cost_model.measure.collective_work import (
    Buffers,
    Pause,
    beyond_pause,
    collective_series,
    pause_series,
    whole_size,
)
from cost_model.measure.kernel_series import DTYPES, least_seconds
from cost_model.measure.kernel_work import matmul_edge, matmul_flops, matmul_work, memory_work
from cost_model.measure.measure import ALWAYS_NBYTES
from cost_model.measure.peers import Team
from cost_model.measure.sampling import Bench, Progress, Series, bench_of
from cost_model.measurements import PLAN_KINDS, CollectiveSamples, MatmulRates, median
from cost_model.profile_record import ProfileRecord

LEAST_TOLERANCE = 0.25


@dataclass(frozen=True)
class CheckedPoint:
    """name:      "all_reduce over dp+tp", "float32 products", "memory".
    size:      bytes of a collective or of memory traffic, operations of a product.
    predicted: seconds by the profile; measured: now.
    tolerance: how far one may be above the other, as a share: twice the recorded spread, at least 0.25.
    """

    name: str
    size: int
    predicted: float
    measured: float
    tolerance: float

    @property
    def holds(self) -> bool:
        low, high = sorted((self.predicted, self.measured))
        return high <= low * (1.0 + self.tolerance)


@dataclass(frozen=True)
class _Expected:
    """A series whose seconds by size are predicted."""

    series: Series
    predict: Callable[[int], float]
    tolerances: tuple[float, ...]
    behind_pause: bool = False


def recheck(
    profile: ProfileRecord,
    mesh: DeviceMesh,
    *,
    time_budget: float = 15.0,
    progress: Progress = lambda what, spent: None,
    clock: Clock | None = None,
) -> tuple[CheckedPoint, ...]:
    """Smallest, middle and largest size of every collective over every group of the mesh, of memory
    traffic and of products by dtype. A point that is off is measured once more, and the nearer time counts.

    Call it on every rank of the mesh; the result is the same on all. A group that the profile has not
    measured is compared with its modelled price. Raises what `Profile.measure` does.
    """
    with bench_of(mesh, clock, progress) as bench:
        alone = [
            replace(one, series=replace(one.series, clock=bench.of_kernels))
            for one in _compute(profile, bench.device)
        ]
        expected = [*alone, *_communication(profile, bench)]

        def measure(some: Sequence[_Expected], seconds: float) -> list[tuple[CheckedPoint, ...]]:
            series = [pause_series(Pause(bench.device), bench.of_kernels), *(one.series for one in some)]
            paused, *curves = bench.curves(series, seconds)
            return [
                _compared(one, (beyond_pause(curve, paused) if one.behind_pause else curve).medians)
                for one, curve in zip(some, curves, strict=True)
            ]

        found = measure(expected, time_budget * 0.7)
        off = [i for i, points in enumerate(found) if not all(point.holds for point in points)]
        again = measure([expected[i] for i in off], time_budget * 0.3) if off else []
        for i, points in zip(off, again, strict=True):
            found[i] = tuple(min(pair, key=_distance) for pair in zip(found[i], points, strict=True))
        return tuple(point for points in found for point in points)


def _compared(expected: _Expected, seconds: Sequence[float]) -> tuple[CheckedPoint, ...]:
    rows = zip(expected.series.sizes, seconds, expected.tolerances, strict=True)
    return tuple(
        CheckedPoint(expected.series.name, size, expected.predict(size), measured, tolerance)
        for size, measured, tolerance in rows
    )


def _distance(point: CheckedPoint) -> float:
    return max(point.predicted, point.measured) / min(point.predicted, point.measured)


def _compute(profile: ProfileRecord, device: torch.device) -> Iterable[_Expected]:
    prices = ComputePrices(profile)
    memory = Series(
        "memory", (2**24,), lambda nbytes: memory_work(nbytes, device), median, least_seconds(device)
    )
    yield _Expected(
        memory, lambda nbytes: prices.launch_seconds + prices.memory_seconds(nbytes), (LEAST_TOLERANCE,)
    )
    for rates in profile.device.matmul:
        if rates.dtype in DTYPES:
            yield _products(prices, rates, device)


def _products(prices: ComputePrices, rates: MatmulRates, device: torch.device) -> _Expected:
    edges = {max(4, round(matmul_edge(flops) / 4) * 4): i for i, flops in enumerate(rates.flops)}
    chosen = dict(_three(sorted(edges.items())))

    def prepare(flops: int) -> Callable[[], object]:
        return matmul_work(matmul_edge(flops), DTYPES[rates.dtype], device)

    return _Expected(
        Series(
            f"{rates.dtype} products",
            tuple(map(matmul_flops, chosen)),
            prepare,
            lambda seconds: median(seconds) / 2,  # two products of a size
            least_seconds(device),
        ),
        lambda flops: prices.matmul_seconds(flops, rates.dtype),
        tuple(_tolerance(rates.spread, i) for i in chosen.values()),
    )


def _communication(profile: ProfileRecord, bench: Bench) -> Iterable[_Expected]:
    prices = CollectivePrices(profile, bench.spec)
    buffers, pause = Buffers(bench.device), Pause(bench.device)
    axes = shapes_of(bench.spec)
    measured = {(samples.kind, samples.group): samples for samples in profile.collectives}
    for shape, team in bench.teams.items():
        for kind in PLAN_KINDS:
            sizes = _sizes(measured.get((kind, shape)), team)
            yield _Expected(
                collective_series(
                    f"{kind} over {'+'.join(axes[shape])}", kind, team, tuple(sizes), buffers, pause
                ),
                partial(prices.seconds, kind, axes[shape]),
                tuple(sizes.values()),
                behind_pause=True,
            )


def _sizes(samples: CollectiveSamples | None, team: Team) -> dict[int, float]:
    """Size -> tolerance."""
    if samples is None:
        return {whole_size(nbytes, team.size): LEAST_TOLERANCE for nbytes in ALWAYS_NBYTES}
    chosen = _three([(nbytes, i) for i, nbytes in enumerate(samples.nbytes)])
    return {whole_size(nbytes, team.size): _tolerance(samples.spread, i) for nbytes, i in chosen}


def _three(items: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """First, middle and last; fewer if there are fewer."""
    return [items[i] for i in dict.fromkeys((0, len(items) // 2, len(items) - 1))]


def _tolerance(spread: Sequence[float], i: int) -> float:
    return max(LEAST_TOLERANCE, 2.0 * spread[i]) if spread else LEAST_TOLERANCE
