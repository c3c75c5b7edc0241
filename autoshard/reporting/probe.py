"""Time every collective of a program, one by one: run its graphs op by op, on the tensors of a real step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Probed", "probe"]


@dataclass(frozen=True)
class Probed:
    """Of one run, in seconds. collectives: parallel to those of the prediction. compute: phase -> all else."""

    collectives: tuple[float, ...]
    compute: Mapping[str, float]


def probe(once: Callable[[], Probed], repeats: int) -> Probed:
    """Medians of so many runs behind one that warms up. All ranks must run alike."""
    once()
    runs = [once() for _ in range(repeats)]
    return Probed(
        tuple(map(statistics.median, zip(*(run.collectives for run in runs), strict=True))),
        {phase: statistics.median(run.compute[phase] for run in runs) for phase in runs[0].compute},
    )
