"""Rows on their way to the ranks of their experts, and back."""

from __future__ import annotations

import pytest

from cost_model.errors import ShardingError
from passes.ir.routing import Choice, copies_of, rows_share, sum_of
from passes.layout.layout import Layout
from passes.redistribution.redistribute import Redistributor
from passes.redistribution.steps import (
    AllGather,
    AllToAll,
    ReduceScatter,
    ReturnRows,
    SendRows,
    ToRouted,
    ToSum,
)
from tests.redistribution.test_redistribute import COLUMNS, ONE_AXIS, R2, ROWS, TWO_AXES, Rates, plan, steps

PAIR = Choice(2, 400)


def test_rows_travel_to_the_ranks_of_their_experts_and_back() -> None:
    """A rank sends what it has, 16 of 64 bytes; a sum of two summands, of four experts on as many ranks, comes back as
    2/4 of 64."""
    routed, few = (Layout(((), ()), (("a", op),)) for op in ("routed", sum_of(Choice(2, 4))))
    assert steps(plan(ROWS, routed, (8, 8))) == [(SendRows, ("a",), 16, 17.0)]
    assert steps(plan(few, ROWS, (8, 8))) == [(ReturnRows, ("a",), 32, 33.0)]
    assert steps(plan(few, R2, (8, 8)))[-1][0] is AllGather
    # The last dim is that of a row: nothing of it is a row's place.
    assert [kind for kind, *_ in steps(plan(COLUMNS, routed, (8, 8)))] == [AllToAll, SendRows]
    assert [kind for kind, *_ in steps(plan(few, COLUMNS, (8, 8)))] == [ReturnRows, AllToAll]


def test_rows_travel_from_the_parts_of_two_dims() -> None:
    """Tokens split in batch and sequence, 8 of 64 bytes each; of sums of two of eight experts on 8 ranks 2/8 of 64."""
    pending = lambda op: Layout(((), (), ()), (("a", op), ("b", op)))
    for tokens in (Layout((("a",), ("b",), ())), Layout((("b",), ("a",), ()))):
        assert steps(plan(tokens, pending("routed"), (8, 4, 2), TWO_AXES)) == [(SendRows, ("a", "b"), 8, 9.0)]
        found = steps(plan(pending(sum_of(Choice(2, 8))), tokens, (8, 4, 2), TWO_AXES))
        assert found == [(ReturnRows, ("a", "b"), 16, 17.0)]


def test_a_token_travels_once_to_each_rank() -> None:
    """Of 400 experts a rank has 100. It has neither of a token's two with probability 300 * 299 / (400 * 399), so that
    1.752 of 4 ranks have one or both. Tokens of two rows, 8 bytes each; a rank has 16 of 64."""
    alike, few = (Layout(((),) * n, (("a", op),)) for n, op in ((3, copies_of(PAIR)), (2, sum_of(PAIR))))
    tokens = Layout((("a",), (), ()))
    assert steps(plan(tokens, alike, (8, 2, 4))) == [(SendRows, ("a",), 14, 15.0)]  # 16 * 1.752 / 2
    assert steps(plan(few, ROWS, (8, 8))) == [(ReturnRows, ("a",), 28, 29.0)]  # 64 * 1.752 / 4
    # Of the two rows of a token nothing may be sent: they are one.
    assert [kind for kind, *_ in steps(plan(Layout(((), ("a",), ())), alike, (8, 2, 4)))] == [
        AllToAll,
        SendRows,
    ]


def test_a_token_travels_once_to_each_host() -> None:
    """Two of four ranks: 1.501 of 2 hosts have one of its two experts or both. For each expert it travels twice."""
    for once, sent, returned in ((2, 12, 24), (0, 16, 32)):  # 16 * 1.501 / 2 and 64 * 1.501 / 4
        choice = Choice(2, 400, once=once)
        alike, few = (
            Layout(((),) * n, (("a", op),)) for n, op in ((3, copies_of(choice)), (2, sum_of(choice)))
        )
        assert steps(plan(Layout((("a",), (), ())), alike, (8, 2, 4))) == [
            (SendRows, ("a",), sent, 1.0 + sent)
        ]
        assert steps(plan(few, ROWS, (8, 8))) == [(ReturnRows, ("a",), returned, 1.0 + returned)]


def test_no_rank_holds_more_on_the_way() -> None:
    """A rank has two of four summands in half of 64 bytes. Where starting is dear they are scattered as they are, which
    takes all 64; within less they return to their tokens, a quarter of them, and are exchanged from there."""
    few = Layout(((), ()), (("a", sum_of(Choice(2, 4))),))
    free = Redistributor(ONE_AXIS, Rates(start=100.0))
    assert rows_share(few.partial, ONE_AXIS) == 2 / 4
    for ways, kinds in ((free, [ToSum, ReduceScatter]), (free.within(63), [ReturnRows, AllToAll])):
        found = ways.plan(few, COLUMNS, (8, 8), 1)
        assert [kind for kind, *_ in steps(found)] == kinds
        assert ways.matrix([few], [COLUMNS], (8, 8), 1)[0, 0] == found.seconds
    # What nothing smaller leads to is brought about all the same.
    summed = Layout(((), ()), (("a", "sum"),))
    assert free.within(63).plan(summed, COLUMNS, (8, 8), 1) == free.plan(summed, COLUMNS, (8, 8), 1)
    assert free.within(63).matrix([summed], [COLUMNS], (8, 8), 1)[0, 0] == 164.0


def test_ranks_share_experts_over_all_axes_at_once() -> None:
    """Rows of the parts over one axis are not there for the parts over two."""
    one, both = (Layout(((), ()), tuple((axis, "routed") for axis in axes)) for axes in ("a", "ab"))
    assert steps(plan(R2, both, (8, 8), TWO_AXES)) == [(ToRouted, ("a", "b"), 0, 0.0)]
    with pytest.raises(ShardingError, match="no redistribution"):
        plan(one, both, (8, 8), TWO_AXES)
