"""Collectives timed as they come in a step: each behind some computing.

Ranks that compute between two collectives come to the next one at different times, above all where they share cores,
and processes that slept must wake. Messages between 2 ranks on 2 cores took 0.2 ms in a row
without a pause, 0.5 ms behind half a millisecond of products, and 1.8 ms behind two. The price of a collective is the
time of both less that of the products alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from cost_model.measure.clock import Clock
from cost_model.measure.collective_work import IN_A_ROW_SECONDS, Buffers, Team, collective_work
from cost_model.measure.sampling import Series
from cost_model.measure.statistics import SampledCurve

__all__ = ["PRODUCTS", "Pause", "beyond_pause", "collective_series", "pause_series"]

Work = Callable[[], object]

PRODUCTS, _EDGE = 10, 128
"""Float32 products and their edge: 42 million operations, about a millisecond of a core."""
_LEAST_SHARE = 0.1
"""The least share of the time of both that is the collective's: noise may leave less of a short one."""


class Pause:
    """The products: `products` of them.

    Results are kept until all are there, as a step keeps what it computes. Ranks that find memory in between are less
    regular: behind 22 ms they came 2.4 to 2.6 ms late without, and 2.6 to 3.9 with it.
    """

    def __init__(self, device: torch.device, products: int = PRODUCTS) -> None:
        self.products = products
        self._x = torch.ones(_EDGE, _EDGE, device=device)

    def __call__(self) -> None:
        results = [torch.mm(self._x, self._x) for _ in range(self.products)]
        del results


def pause_series(pause: Pause, clock: Clock) -> Series:
    """The series of the products alone, by the clock of kernels. size: their number."""
    return Series(
        "pause", (max(1, pause.products),), lambda _: pause, least=IN_A_ROW_SECONDS, ahead=True, clock=clock
    )


def collective_series(
    name: str,
    kind: str,
    team: Team,
    sizes: tuple[int, ...],
    buffers: Buffers,
    pause: Pause,
    always: tuple[int, ...] = (),
    calls: int = 1,
) -> Series:
    """The series of the products and then `kind` over the team's group, at least `calls` times in a row.

    Sizes are bytes by `cost_model.collectives`."""

    def prepare(nbytes: int) -> Work:
        communicate = collective_work(kind, team, buffers, nbytes)

        def both() -> None:
            pause()
            communicate()

        return both

    return Series(name, sizes, prepare, least=IN_A_ROW_SECONDS, always=always, calls=calls, ahead=True)


def beyond_pause(curve: SampledCurve, pause: SampledCurve) -> SampledCurve:
    """What the collective of a series takes beyond the pause before it."""
    (alone,) = pause.seconds
    left = lambda seconds: max(seconds - alone, _LEAST_SHARE * seconds)
    spread = zip(curve.spread, curve.medians, strict=True)
    return replace(
        curve,
        medians=tuple(map(left, curve.medians)),
        seconds=tuple(map(left, curve.seconds)),
        spread=tuple(round(share * both / left(both), 4) for share, both in spread),
    )
