"""The table of messages against a dict of positions, and exchanges of it in lockstep against slices of the whole."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from passes.layout.layout import Span
from passes.ops.halo_op import add_up, pack, put_together, row_numel, split_sizes, unpack
from passes.redistribution.halo_steps import (
    Traffic,
    anything_foreign,
    exchange_traffic,
    pieces,
    reduce_traffic,
)
from tests.redistribution.layouts import random_sizes

SEEDS = 300

Case = tuple[tuple[Span, ...], tuple[Span, ...], int]


def random_case(seed: int) -> Case:
    """(held, wanted, length) of 1 to 8 ranks: empty and single rows, near, far and wrapping around."""
    rng = random.Random(seed)
    ranks, length = rng.randint(1, 8), rng.choice([0, 1, 2, 3, 5, 8, 13])
    sizes = random_sizes(rng, length, ranks)
    held = tuple((end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))
    low, high = rng.choice([(0, length), (-length, 2 * length)])
    ends = (sorted((rng.randint(low, high), rng.randint(low, high))) for _ in range(ranks))
    return held, tuple((lo, hi) for lo, hi in ends), length


def indices(span: Span, length: int) -> list[int]:
    return [place % length for place in range(*span)]


def test_every_place_of_every_buffer_is_sent_once() -> None:
    for seed in range(SEEDS):
        held, wanted, length = random_case(seed)
        owner = {row: rank for rank, span in enumerate(held) for row in range(*span)}
        for receiver, want in enumerate(wanted):
            expected: dict[int, dict[int, int]] = defaultdict(dict)  # sender -> place -> row
            for place, row in enumerate(indices(want, length)):
                expected[owner[row]][place] = row
            for sender, span in enumerate(held):
                found = [
                    (piece.place + i, piece.lo + i)
                    for piece in pieces(span, want, length)
                    for i in range(piece.size)
                ]
                assert found == sorted(expected[sender].items()), (seed, sender, receiver)


def test_by_hand() -> None:
    """Two ranks of a ring of 8: each has a neighbour's row before its part and after it."""
    assert pieces((4, 8), (-1, 5), 8) == ((7, 8, 0), (4, 5, 5))
    assert pieces((0, 4), (-1, 5), 8) == ((0, 4, 1),)
    assert pieces((0, 4), (2, 2), 8) == ()
    assert pieces((0, 0), (0, 0), 0) == ()
    # One rank around a whole turn and a row more: in three pieces.
    assert pieces((0, 3), (-1, 4), 3) == ((2, 3, 0), (0, 3, 1), (0, 1, 4))


def test_foreign_is_what_another_holds() -> None:
    held = ((0, 4), (4, 8))
    assert not anything_foreign(held, ((0, 3), (5, 8)), 8)
    assert not anything_foreign(held, ((0, 4), (2, 2)), 8)
    assert anything_foreign(held, ((0, 4), (3, 8)), 8)
    assert anything_foreign(held, ((0, 4), (4, 9)), 8)
    assert not anything_foreign(((0, 3),), ((-3, 6),), 3)  # it is its own neighbour


def lockstep(
    parts: Sequence[Tensor],
    dim: int,
    case: Case,
    traffic_of: Callable[..., Traffic],
    assemble: Callable[..., Tensor],
) -> list[Tensor]:
    """What all ranks get, with the all-to-all done here."""
    held, wanted, length = case
    ranks = range(len(parts))
    traffics = [traffic_of(held, wanted, length, rank) for rank in ranks]
    buffers = []
    for rank, (x, traffic) in enumerate(zip(parts, traffics, strict=True)):
        leaving = split_sizes(traffic.sent, row_numel(x, dim), rank)
        buffers.append(pack(x, dim, traffic, rank).split(leaving))
    results = []
    for rank, (x, traffic) in enumerate(zip(parts, traffics, strict=True)):
        arriving = split_sizes(traffic.received, row_numel(x, dim), rank)
        assert arriving == [buffers[sender][rank].numel() for sender in ranks]
        flat = torch.cat([buffers[sender][rank] for sender in ranks])
        results.append(assemble(unpack(flat, x, dim, traffic, rank), x, dim, traffic))
    return results


def cut(whole: Tensor, dim: int, spans: Sequence[Span], length: int) -> list[Tensor]:
    return [whole.index_select(dim, torch.tensor(indices(span, length), dtype=torch.int64)) for span in spans]


def test_exchange_and_transpose() -> None:
    """Exchanged parts are slices of the whole; and <exchange(x), y> = <x, reduce(y)> in whole numbers."""
    for seed in range(SEEDS):
        case = held, wanted, length = random_case(seed)
        dim = seed % 3
        shape = [2, 3, 2]
        shape[dim] = length
        generator = torch.Generator().manual_seed(seed)
        whole = torch.randint(-99, 99, shape, generator=generator)
        parts = cut(whole, dim, held, length)
        exchanged = lockstep(parts, dim, case, exchange_traffic, put_together)
        for rank, want in enumerate(cut(whole, dim, wanted, length)):
            assert torch.equal(exchanged[rank], want), (seed, rank)
        other = [torch.randint(-99, 99, y.shape, generator=generator) for y in exchanged]
        reduced = lockstep(other, dim, case, reduce_traffic, add_up)
        left = sum(int((a * b).sum()) for a, b in zip(exchanged, other, strict=True))
        right = sum(int((a * b).sum()) for a, b in zip(parts, reduced, strict=True))
        assert left == right, seed
        total = torch.zeros_like(whole)
        for span, y in zip(wanted, other, strict=True):
            total.index_add_(dim, torch.tensor(indices(span, length), dtype=torch.int64), y)
        for rank, want in enumerate(cut(total, dim, held, length)):
            assert torch.equal(reduced[rank], want), (seed, rank)
