"""Times that never fall with size, from measured times that fall by a little."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["NOISE", "pooled", "worst_fall"]

NOISE = 0.40
"""How far a time may fall below that of fewer bytes and still be taken for noise, relative.

Small messages all take the same time, give or take 10 to 20 per cent. Where NCCL changes its algorithm or
protocol a larger message can be faster than a smaller one: 34 per cent was seen between 4 and 8 MiB on two
nodes, in every run. One disturbed measurement is usually several times too long.
"""


def worst_fall(times: Sequence[float]) -> tuple[int, int, float]:
    """(i, j, fall): times[j] is `fall` (relative) below the earlier times[i], the most of all pairs."""
    worst = (0, 0, 0.0)
    highest = 0
    for j, time in enumerate(times):
        if time >= times[highest]:
            highest = j
        elif 1.0 - time / times[highest] > worst[2]:
            worst = (highest, j, 1.0 - time / times[highest])
    return worst


def pooled(times: Sequence[float]) -> tuple[float, ...]:
    """The non-decreasing sequence nearest to `times` in least squares. Neighbours that fall get their mean.

    (3, 1, 2, 5) -> (2, 2, 2, 5). Pool adjacent violators. [Barlow et al. 1972]
    """
    blocks: list[tuple[float, int]] = []  # mean, how many
    for time in times:
        mean, count = time, 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean = (before * many + mean * count) / (many + count)
            count += many
        blocks.append((mean, count))
    return tuple(mean for mean, count in blocks for _ in range(count))
