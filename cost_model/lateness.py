"""How late the last rank of a group comes to a collective, by how long the ranks have computed since they last met."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass

__all__ = ["Lateness"]


@dataclass(frozen=True)
class Lateness:
    """Measured (`cost_model.measure.late_ranks`).

    computing_seconds: of computing since ranks last met, increasing. seconds: by how much longer a collective takes
    behind each than behind the first, which is what collectives are priced with; not falling, from 0 on.

    Linear between the points; 0 below the first, and beyond the last as at the last: nobody looked there.
    """

    computing_seconds: tuple[float, ...]
    seconds: tuple[float, ...]

    def after(self, computed: float) -> float:
        """Seconds by which a collective is longer that comes behind `computed` seconds of computing."""
        xs, ys = self.computing_seconds, self.seconds
        i = bisect_right(xs, computed)
        if i == 0:
            return 0.0
        if i == len(xs):
            return ys[-1]
        share = (computed - xs[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + share * (ys[i] - ys[i - 1])

    def mistake(self) -> str | None:
        """What is wrong with it, if anything is."""
        if len(self.computing_seconds) != len(self.seconds):
            return "needs a time for each time of computing"
        if any(now <= before for before, now in itertools.pairwise(self.computing_seconds)):
            return "needs increasing times of computing"
        if any(now < before for before, now in itertools.pairwise(self.seconds)):
            return "says that ranks come earlier behind more computing"
        return None
