"""How much longer a collective takes behind more computing than it is timed behind.

Ranks that compute come to the next collective at different times, the longer they computed the more so, above all where
they share cores. Four ranks on two cores, an all-reduce of 4 KiB: 1.4 to 1.7 ms behind a millisecond of products, 2 to
2.4 behind 4, 3.8 to 5.4 behind 16 and 8 to 10 behind 48; of 256 KiB as much longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from cost_model.groups import GroupShape
from cost_model.lateness import Lateness
from cost_model.measure.behind import PRODUCTS, Pause, collective_series, pause_series
from cost_model.measure.clock import Clock
from cost_model.measure.collective_work import Buffers, Team, whole_size
from cost_model.measure.peers import Peers
from cost_model.measure.sampling import Progress, sample

__all__ = ["lateness", "measure_lateness"]

_TIMES = (1, 4, 16, 48)
"""Of the products that collectives are timed behind: about 1, 4, 16 and 48 milliseconds of a core."""
_KIND, _NBYTES = "all_reduce", 2**12
"""What ranks come late to: little data, so that little else takes time."""
_CALLS = 8
"""In a row, at least. Nobody is late behind a barrier: one call at a time, behind 22 ms, said 1.3 to 4.9 ms."""


def measure_lateness(
    teams: Mapping[GroupShape, Team],
    peers: Peers,
    clock: Clock,
    of_kernels: Clock,
    seconds: float,
    device: torch.device,
    progress: Progress,
) -> Lateness | None:
    """Over the largest group, in about `seconds`; None for one rank, for which nobody is late."""
    if not teams:
        return None
    team = max(teams.values(), key=lambda team: team.size)
    buffers, nbytes = Buffers(device), (whole_size(_NBYTES, team.size),)
    pauses = [Pause(device, PRODUCTS * times) for times in _TIMES]
    alone = [pause_series(pause, of_kernels) for pause in pauses]
    both = [
        collective_series(
            f"{_KIND} behind {pause.products} products", _KIND, team, nbytes, buffers, pause, calls=_CALLS
        )
        for pause in pauses
    ]
    curves = [curve.seconds[0] for curve in sample([*alone, *both], peers, clock, seconds, progress)]
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
