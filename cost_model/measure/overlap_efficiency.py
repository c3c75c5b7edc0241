"""How much of a collective hides behind products, and the reverse.

Where ranks share cores, what of a collective is processor time, gloo's threads included, hides behind nothing: the
cores would compute in it. By the clock, with and without products, three profiles of one cluster said 0.34, 0.58 and
0.99, as turns on the cores fell; so there it is the share of the collective's time in which no core works for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from cost_model.curve import median
from cost_model.measure.clock import Clock, Work
from cost_model.measure.collective_work import (
    IN_A_ROW_SECONDS,
    PRODUCTS,
    Buffers,
    Pause,
    collective_series,
    pause_series,
    whole_size,
)
from cost_model.measure.kernel_work import matmul_edge, matmul_flops, overlap_works
from cost_model.measure.peers import Team
from cost_model.measure.sampling import Bench, Series
from cost_model.measurements import CollectiveSamples, DeviceRates, Lateness

_SHARED_NBYTES = 2**20
"""Of the collective where ranks share cores: between a bucket of gradients and a small activation."""


def hidden_share(communication: float, compute: float, both: float) -> float:
    """The share of the shorter of two works that is hidden when they run at once, clamped to [0, 1].

    a, b, both: seconds of each alone and of both, with both = a + b - share * min(a, b).
    """
    share = (communication + compute - both) / min(communication, compute)
    return min(1.0, max(0.0, share))


def waiting_share(seconds: float, processor_seconds: float) -> float:
    """The share of a collective in which nobody computes for it, clamped to [0, 1].

    processor_seconds: of one rank's threads, times the ranks for each core.
    """
    return min(1.0, max(0.0, 1.0 - processor_seconds / seconds))


def overlap_efficiency(
    bench: Bench, collectives: Sequence[CollectiveSamples], rates: DeviceRates, seconds: float
) -> float:
    """Measured with an all-reduce over the largest group and about as long a run of float32 products; of the all-reduce
    alone where ranks share cores.

    0 for one rank, which has nothing to hide.
    """
    team = bench.largest
    if team is None:
        return 0.0
    shared = bench.of_kernels is not bench.clock
    if shared:
        series = _on_shared_cores(team, bench.of_kernels, bench.device)
    else:
        shape = next(shape for shape, one in bench.teams.items() if one is team)
        samples = next(s for s in collectives if (s.kind, s.group) == ("all_reduce", shape))
        series = _with_products(team, samples, rates, bench.device)
    found = [curve.seconds[0] for curve in bench.curves(series, seconds)]
    return waiting_share(*found) if shared else hidden_share(*found)


def _with_products(
    team: Team, samples: CollectiveSamples, rates: DeviceRates, device: torch.device
) -> list[Series]:
    """An all-reduce, about as long a run of products, and both at once."""
    middle = len(samples.nbytes) * 2 // 3
    nbytes, alone = samples.nbytes[middle], samples.seconds[middle]
    float32 = next(rate for rate in rates.matmul if rate.dtype == "float32")
    at = len(float32.flops) // 2
    edge = matmul_edge(float32.flops[at])
    products = max(1, round(alone * float32.flops_per_second[at] / matmul_flops(edge)))
    works = overlap_works(team, nbytes, edge, products, device)
    names = ("all_reduce alone", "products alone", "all_reduce behind products")
    return [_series(name, nbytes, work) for name, work in zip(names, works, strict=True)]


def _on_shared_cores(team: Team, of_kernels: Clock, device: torch.device) -> list[Series]:
    """An all-reduce by the clock, of which the slowest rank's counts, and its processor time, the median rank's as for
    kernels."""
    work, _, _ = overlap_works(team, _SHARED_NBYTES, 1, 0, device)
    alone = _series("all_reduce alone", _SHARED_NBYTES, work)
    working = replace(alone, name="processor time of an all_reduce", across=median, clock=of_kernels)
    return [alone, working]


def _series(name: str, nbytes: int, work: Work) -> Series:
    return Series(name, (nbytes,), lambda _: work, least=IN_A_ROW_SECONDS, ahead=True)


_TIMES = (1, 4, 16, 48)
"""Of the products that collectives are timed behind: about 1, 4, 16 and 48 milliseconds of a core."""
_KIND, _NBYTES = "all_reduce", 2**12
"""What ranks come late to: little data, so that little else takes time."""
_CALLS = 8
"""In a row, at least. Nobody is late behind a barrier: one call at a time, behind 22 ms, said 1.3 to 4.9 ms."""


def measure_lateness(bench: Bench, seconds: float) -> Lateness | None:
    """How much longer a collective takes behind more computing than it is timed behind, over the largest group, in
    about `seconds`; None for one rank, for which nobody is late.

    Ranks that compute come to the next collective at different times, the longer they computed the more so, above all
    where they share cores. Four ranks on two cores, an all-reduce of 4 KiB: 1.4 to 1.7 ms behind a millisecond of
    products, 2 to 2.4 behind 4, 3.8 to 5.4 behind 16 and 8 to 10 behind 48; of 256 KiB as much longer.
    """
    team = bench.largest
    if team is None:
        return None
    buffers, nbytes = Buffers(bench.device), (whole_size(_NBYTES, team.size),)
    pauses = [Pause(bench.device, PRODUCTS * times) for times in _TIMES]
    alone = [pause_series(pause, bench.of_kernels) for pause in pauses]
    both = [
        collective_series(
            f"{_KIND} behind {pause.products} products", _KIND, team, nbytes, buffers, pause, calls=_CALLS
        )
        for pause in pauses
    ]
    curves = [curve.seconds[0] for curve in bench.curves([*alone, *both], seconds)]
    return lateness(curves[: len(_TIMES)], curves[len(_TIMES) :], team.size)


def lateness(computing: Sequence[float], both: Sequence[float], ranks: int) -> Lateness | None:
    """From seconds of computing alone, and with the collective of `ranks` behind it.

    Times that fall are noise: no rank is earlier behind more computing. None where computing took no longer.
    """
    first = both[0] - computing[0]
    late = accumulate((b - c - first for b, c in zip(both, computing, strict=True)), max)
    points: list[tuple[float, float]] = []
    for computed, seconds in zip(computing, late, strict=True):
        if not points or computed > points[-1][0]:
            points.append((computed, max(0.0, seconds)))
    if len(points) < 2 or points[0][0] <= 0.0:
        return None
    computing_seconds, seconds = zip(*points, strict=True)
    return Lateness(computing_seconds, seconds, ranks)
