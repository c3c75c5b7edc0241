"""The table of messages against a dict of positions, and exchanges of it in lockstep against slices of the whole."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from cost_model.mesh import MeshSpec
from passes.layout.layout import Halo, Layout, Span
from passes.ops.halo_op import AtOnce, HaloSite, halo_exchange, halo_reduce, pieces
from passes.redistribution.steps import HaloExchange, HaloReduce
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


@dataclass(frozen=True)
class Mail(AtOnce):
    """What ranks send each other, one after the other: all of them write before the first one reads."""

    rank: int = 0
    boxes: dict[int, list[Tensor]] = field(default_factory=dict)
    reads: bool = False

    def waited(self, target: Any, x: Any, shape: Sequence[int], args: Sequence[Any]) -> Any:
        arriving, leaving, _ = args
        self.boxes[self.rank] = list(x.split(leaving))
        if not self.reads:
            return x.new_zeros(shape)
        found = [self.boxes[sender][self.rank] for sender in range(len(leaving))]
        assert [one.numel() for one in found] == arriving
        return torch.cat(found)


def lockstep(parts: Sequence[Tensor], dim: int, case: Case, summed: bool) -> list[Tensor]:
    """What all ranks get, with the all-to-all done here; nothing is sent where nobody wants what another holds."""
    held, wanted, length = case
    axes = [("group",) if d == dim else () for d in range(3)]
    halo = Halo(wanted, summed)
    sizes = tuple(hi - lo for lo, hi in held)
    ends = [
        Layout(tuple(axes), (), tuple(sizes if a else None for a in axes)),
        Layout(tuple(axes), halos=tuple(halo if a else None for a in axes)),
    ]
    before, after = reversed(ends) if summed else ends
    step = (HaloReduce if summed else HaloExchange)(before=before, after=after, axes=("group",), dim=dim)
    move, mesh = halo_reduce if summed else halo_exchange, MeshSpec({"group": len(parts)})
    mail = Mail(fx.Graph(), {})
    results: list[Any] = []
    for reads in (False, True):
        emits = [replace(mail, rank=rank, reads=reads) for rank in range(len(parts))]
        shape = tuple(length if d == dim else n for d, n in enumerate(parts[0].shape))
        sites = [HaloSite(emit, step, shape, mesh, emit.rank, {("group",): "g"}) for emit in emits]
        results = [move(site, x) for site, x in zip(sites, parts, strict=True)]  # type: ignore[arg-type]
    foreign = any(
        set(indices(want, length)) - set(indices(mine, length))
        for mine, want in zip(held, wanted, strict=True)
    )
    assert bool(mail.boxes) == foreign
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
        exchanged = lockstep(parts, dim, case, summed=False)
        for rank, want in enumerate(cut(whole, dim, wanted, length)):
            assert torch.equal(exchanged[rank], want), (seed, rank)
        other = [torch.randint(-99, 99, y.shape, generator=generator) for y in exchanged]
        reduced = lockstep(other, dim, case, summed=True)
        left = sum(int((a * b).sum()) for a, b in zip(exchanged, other, strict=True))
        right = sum(int((a * b).sum()) for a, b in zip(parts, reduced, strict=True))
        assert left == right, seed
        total = torch.zeros_like(whole)
        for span, y in zip(wanted, other, strict=True):
            total.index_add_(dim, torch.tensor(indices(span, length), dtype=torch.int64), y)
        for rank, want in enumerate(cut(total, dim, held, length)):
            assert torch.equal(reduced[rank], want), (seed, rank)
