"""Measure a `Profile` on the ranks of a mesh, all at once; and whether one still holds: a few of its points are
measured again and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from torch.distributed.device_mesh import DeviceMesh

from cost_model.collectives import CollectivePrices
from cost_model.compute import ComputePrices
from cost_model.errors import ProfileError, ShardingError, is_number, is_whole, shown
from cost_model.groups import GroupShape, group_ranks, occupancy, shape_text, shapes_of
from cost_model.measure.clock import Clock
from cost_model.measure.collective_work import (
    Buffers,
    Pause,
    beyond_pause,
    collective_series,
    pause_series,
    whole_size,
)
from cost_model.measure.host_memory import host_memory_of
from cost_model.measure.kernel_work import (
    DTYPES,
    Attend,
    device_rates,
    device_series,
    kernel_series,
    least_seconds,
    matmul_edge,
    matmul_flops,
    matmul_work,
    memory_work,
    with_kernel_rates,
)
from cost_model.measure.links import Levels, fit_links, measure_lateness, overlap_efficiency
from cost_model.measure.peers import (
    Peers,
    Team,
    collective_backend,
    device_name,
    hardware_text,
    host_name,
    software_versions,
    today,
)
from cost_model.measure.sampling import Bench, Progress, Series, bench_of, by_device
from cost_model.measurements import (
    PLAN_KINDS,
    CollectiveSamples,
    LinkLevel,
    MatmulRates,
    SampledCurve,
    median,
)
from cost_model.profile_record import ProfileRecord

SMALLEST_NBYTES = 2**12
LARGEST_NBYTES = {"cpu": 2**26, "cuda": 2**30}
ALWAYS_NBYTES = (2**12, 2**18, 2**24)
"""Sizes that are always measured, unless they are above the largest size."""
_OVERLAP_SHARE, _LATE_SHARE = 0.1, 0.1
"""The shares of the budget for `overlap_efficiency`, and for ranks that come late."""


def measure_profile(
    mesh: DeviceMesh,
    time_budget: float,
    largest_nbytes: int | None,
    name: str,
    command: str,
    progress: Progress,
    clock: Clock | None,
    attend: Attend | None,
) -> ProfileRecord:
    """See `Profile.measure`."""
    _check_arguments(time_budget, largest_nbytes)
    with bench_of(mesh, clock, progress) as bench:
        device, peers = bench.device, bench.peers
        hosts, names = zip(*peers.everyones((host_name(), device_name(device.type))), strict=True)
        kernels = kernel_series(device, mesh if peers.size > 1 else None, attend)
        compute = device_series(device)
        communication = _communication(
            bench, nbytes_ladder(largest_nbytes or by_device(LARGEST_NBYTES, device.type))
        )
        alone = [replace(series, clock=bench.of_kernels) for series in (*compute, *kernels)]
        seconds = time_budget * (1.0 - _OVERLAP_SHARE - _LATE_SHARE)
        curves = iter(bench.curves([*alone, *communication], seconds))
        rates = device_rates(list(islice(curves, len(compute))))
        rates = with_kernel_rates(rates, list(islice(curves, len(kernels))), device)
        collectives = _collective_samples(bench.teams, list(curves))
        overlap = overlap_efficiency(bench, collectives, rates, _OVERLAP_SHARE * time_budget)
        late = measure_lateness(bench, _LATE_SHARE * time_budget)
        launch, links = _links(hosts, collectives, device)
        if bench.teams and device.type == "cpu":
            links = _sharing(links, bench)
        profile = ProfileRecord(
            name=name,
            nominal=False,
            device_type=device.type,
            hardware=hardware_text(hosts, names),
            software=software_versions(device.type, collective_backend(mesh)),
            date=today(),
            command=f"{command} ({bench.spec.device_count} ranks, {bench.spec})".strip(),
            sources=(*_sources(peers), _attention_source(attend)),
            collective_launch_seconds=launch,
            overlap_efficiency=overlap,
            links=links,
            collectives=collectives,
            device=rates,
            lateness=late,
        )
        # Dates and commands may differ between ranks, but all must have one profile and its hash.
        return peers.first(profile)


def nbytes_ladder(largest: int) -> tuple[int, ...]:
    """4 KiB, 16 KiB, ... up to `largest`; then `largest` itself."""
    sizes = [SMALLEST_NBYTES]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return tuple(dict.fromkeys((*sizes, largest)))


def _communication(bench: Bench, sizes: Sequence[int]) -> list[Series]:
    """The pause, then one series per shape and kind, shapes first. All groups of a shape communicate at once."""
    buffers, pause = Buffers(bench.device), Pause(bench.device)
    always = {min(nbytes, sizes[-1]) for nbytes in ALWAYS_NBYTES}
    found = [pause_series(pause, bench.of_kernels)] if bench.teams else []
    for shape, team in bench.teams.items():
        whole = {whole_size(nbytes, team.size): nbytes in always for nbytes in sizes}
        anchors = tuple(nbytes for nbytes, anchor in whole.items() if anchor)
        for kind in PLAN_KINDS:
            name = f"{kind} over {shape_text(shape)}"
            found.append(collective_series(name, kind, team, tuple(whole), buffers, pause, anchors))
    return found


def check_device_type(device_type: str) -> None:
    """ShardingError for a type that is not measured, or a GPU that is not there."""
    if device_type not in ("cpu", "cuda"):
        raise ShardingError(f"cannot measure devices of type {device_type!r}\n  try: 'cpu' or 'cuda'")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ShardingError("cannot measure GPUs: torch finds none\n  try: device type 'cpu'")


def _check_arguments(time_budget: float, largest_nbytes: int | None) -> None:
    if not is_number(time_budget) or not 0.0 < time_budget < float("inf"):
        raise ProfileError(f"time_budget is {shown(time_budget)}\n  try: a number above 0, such as 60.0")
    if largest_nbytes is not None and not (
        is_whole(largest_nbytes) and 2 * SMALLEST_NBYTES <= largest_nbytes < 2**40
    ):
        raise ProfileError(
            f"largest_nbytes is {shown(largest_nbytes)}; a curve starts at {SMALLEST_NBYTES} bytes\n"
            "  try: 2**26, the default on CPUs"
        )


def _collective_samples(
    teams: Mapping[GroupShape, Team], curves: Sequence[SampledCurve]
) -> tuple[CollectiveSamples, ...]:
    """The samples from the curves of `_communication`."""
    if not teams:
        return ()
    keys = [(kind, shape) for shape in teams for kind in PLAN_KINDS]
    pause, *others = curves
    alone = (beyond_pause(curve, pause) for curve in others)
    return tuple(
        CollectiveSamples(kind, shape, curve.sizes, curve.seconds, curve.spread)
        for (kind, shape), curve in zip(keys, alone, strict=True)
    )


def _links(
    hosts: Sequence[str], collectives: Sequence[CollectiveSamples], device: torch.device
) -> tuple[float, tuple[LinkLevel, ...]]:
    if collectives:
        return fit_links(levels_of(hosts), collectives)
    nominal = ProfileRecord.named("h100" if device.type == "cuda" else "cpu")
    return nominal.collective_launch_seconds, nominal.links


def _sharing(links: tuple[LinkLevel, ...], bench: Bench) -> tuple[LinkLevel, ...]:
    """`links`, of which the innermost is memory where all groups inside it share some."""
    domains = [link.ranks for link in links]
    within = lambda shape: occupancy(group_ranks(shape), domains).uses[-1].level == 0
    inner = [team.group for shape, team in bench.teams.items() if within(shape)]
    mine = bool(inner) and all(host_memory_of(group) is not None for group in inner)
    return (replace(links[0], shares_memory=all(bench.peers.everyones(mine))), *links[1:])


def _attention_source(attend: Attend | None) -> str:
    what = "torch's own" if attend is None else "the kernel that plans run"
    return f"Attention: {what}, without a mask."


def _sources(peers: Peers) -> tuple[str, ...]:
    if peers.size == 1:
        return ("Links and overlap: nominal. One rank has nobody to communicate with.",)
    return (
        "Collectives: medians over repetitions of the slowest rank's time, all groups of a shape at once, "
        "with the copies around them; times that fell with size were pooled.",
        "Links: fitted to the collectives; peak: twice the best rate observed.",
        "Device: the median rank, all ranks computing at once.",
    )


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
        expected = [*alone, *_communication_again(profile, bench)]

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


def _communication_again(profile: ProfileRecord, bench: Bench) -> Iterable[_Expected]:
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


def levels_of(hosts: Sequence[str]) -> Levels:
    """The levels of a world whose rank i runs on `hosts[i]`.

    There are two levels, inside and between hosts, if every host holds the same number of ranks, in a row. Else one
    level joins all.
    """
    count = len(set(hosts))
    if count == 1:
        return Levels(("inside the host",), (None,))
    each = len(hosts) // count
    blocks = [set(hosts[i : i + each]) for i in range(0, len(hosts), each)]
    aligned = len(hosts) == each * count and all(len(block) == 1 for block in blocks)
    if each == 1 or not aligned:
        return Levels(("between hosts",), (None,))
    return Levels(("inside a host", "between hosts"), (each, None))
