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
    ranks: of the group that it was measured over; None: any group's.

    Linear between the points; 0 below the first, and beyond the last as at the last: nobody looked there.
    """

    computing_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    ranks: int | None = None

    def after(self, computed: float, ranks: int) -> float:
        """Seconds by which a collective of `ranks` is longer that comes behind `computed` seconds of computing.

        Fewer ranks are less far apart, as the expected range of n values of one uniform distribution is (n - 1) /
        (n + 1) of its width   [order statistics]
        """
        share = 1.0 if self.ranks is None else _range(ranks) / _range(self.ranks)
        return share * self._measured(computed)

    def _measured(self, computed: float) -> float:
        """Of the group that it was measured over."""
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
        if self.ranks is not None and self.ranks < 2:
            return "needs two ranks at least"
        return None


def _range(ranks: int) -> float:
    return (ranks - 1) / (ranks + 1)
