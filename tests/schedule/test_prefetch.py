"""When gathers start, by hand: ten ops of a second each, all at hand."""

from __future__ import annotations

import pytest

from passes.schedule.issue_order import Place
from passes.schedule.schedule import Prefetch

ELAPSED = [float(second) for second in range(11)]


def places(
    read: list[int],
    seconds: list[float],
    nbytes: list[int] | None = None,
    awaited: tuple[int, ...] = (),
    reductions: tuple[tuple[Place, float], ...] = (),
) -> list[tuple[int, Place]]:
    """read: position of each gather's reader. seconds: prices, a quarter of slack left out."""
    return Prefetch(ELAPSED, read, seconds, nbytes or [1] * len(read)).places(awaited, [reductions])


def test_two_in_flight_where_that_is_enough() -> None:
    """Each takes half of the second that its reader's op before takes: issued when the one two before is read."""
    assert places([1, 2, 3, 4], [0.4] * 4) == [(2, (0, 0)), (2, (0, 0)), (2, (2, 0)), (2, (4, 0))]


def test_a_long_gather_starts_earlier() -> None:
    """The last takes 4 seconds, 5 with slack: it starts at 9 - 5 = 4, when the first is read and four others are
    not."""
    large = [1, 1, 1, 1, 1, 100]
    assert places([4, 5, 6, 7, 8, 9], [0.01] * 5 + [4.0], large)[-1] == (5, (8, 0))
    assert places([4, 5, 6, 7, 8, 9], [0.01] * 6)[-1] == (2, (14, 0))


def test_memory_bounds_how_many_are_in_flight() -> None:
    """All are as large: no more than four of them."""
    assert places([4, 5, 6, 7, 8, 9], [4.0] * 6)[-1][0] == 4
    assert places([4, 5, 6, 7, 8, 9], [4.0] * 6, [1, 1, 1, 1, 1, 100])[-1][0] == 5


def test_where_memory_is_short_several_share_it() -> None:
    """Each of 4 bytes, and of 6 seconds with slack: room for two of them, or for none but the one that is due."""
    read = [4, 5, 6, 7, 8, 9]
    depths = lambda room: [d for d, _ in Prefetch(ELAPSED, read, [5.0] * 6, [4] * 6, room).places((), [()])]
    assert depths(9) == [1, 2, 2, 2, 2, 2]
    assert depths(0) == [1] * 6


@pytest.mark.parametrize(
    ("seconds", "awaited", "expected"),
    [
        (1.0, (2,), (5, 1)),  # ready at 3, in the midst of the gather, which is there by 5 nevertheless
        (0.4, (2,), (4, 0)),  # the gather has arrived before that
        (2.4, (2,), (4, 0)),  # three seconds with slack: it would come too late
    ],
)
def test_what_others_wait_for_goes_first_if_there_is_time(
    seconds: float, awaited: tuple[int, ...], expected: Place
) -> None:
    """Gathers read at 1, 2 and 5: the last is issued when the first but one before is read, at 2."""
    assert places([2, 2, 5], [0.1, 0.1, seconds], awaited=awaited)[-1][1] == expected


def test_a_long_reduction_does_not_hold_up_a_gather() -> None:
    """Read at 6, issued at 4 when nothing is in its way. A reduction of 3 seconds from 2 on would be: it goes before
    that."""
    assert places([3, 4, 6], [0.1] * 3)[-1] == (2, (6, 0))
    assert places([3, 4, 6], [0.1] * 3, reductions=(((3, 1), 3.9),))[-1] == (3, (3, 0))
    assert places([3, 4, 6], [0.1] * 3, reductions=(((3, 1), 3.0),))[-1] == (2, (6, 0))


def test_reductions_wait_for_each_other() -> None:
    """Either of two seconds would have arrived by 6, from 2 and 3 on; one behind the other the second has not."""
    assert places([3, 4, 6], [0.1] * 3, reductions=(((3, 1), 2.0), ((5, 1), 1.0)))[-1] == (2, (6, 0))
    assert places([3, 4, 6], [0.1] * 3, reductions=(((3, 1), 2.0), ((5, 1), 2.0)))[-1] == (3, (5, 0))
