"""Rows that go to the ranks of their experts, and back: collectives of as many rows as come.

    sent(whole, part, dim, sizes, index, ways, group)       whole: gathered of parts, of which own experts' rows count
    returned(part, whole, dim, sizes, index, ways, group)   part: reduce-scattered of whole, rows of own experts and 0
    routes(ids, places, dim, sizes, index, experts)         who sends what to whom
    exchange_rows(a, like, sent, received, group)           rows in the order of ranks, from each and to each

The first two are their first operand: what a rank's graph says of a collective that moves more than is wanted. A
program, which has its own rows alone (`passes.lower.own_rows`), has the last two in its place. sizes: of the parts
of `dim`, by rank of the group; index: of this rank; ways: ranks along each axis of the group; experts: how many each
rank has. ids, of all rows of the group: int64, [*s]; every rank of the group has the same, so that no numbers are
exchanged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from passes.ops.named_collective import all_to_all
from passes.ops.registration import operator

_first = lambda x, *_: x

sent, returned = (
    operator(
        f"{name}(Tensor a, Tensor b, int dim, int[] sizes, int index, int[] ways, str group_name) -> Tensor",
        _first,
        _first,
    )
    for name in ("sent", "returned")
)
"""See the module."""


def _routes(
    ids: Tensor, places: Tensor, dim: int, sizes: Sequence[int], index: int, experts: Sequence[int]
) -> tuple[Tensor, ...]:
    ends = lambda parts: torch.tensor([*itertools.accumulate(parts)], device=ids.device)
    own = ids.narrow(dim, sum(sizes[:index]), sizes[index]).reshape(-1)
    by_expert, mine = own.sort(stable=True)
    leaving = torch.searchsorted(by_expert, ends(experts))
    part = places // math.prod(ids.shape[dim + 1 :]) % ids.shape[dim]
    by_rank, arriving = torch.searchsorted(ends(sizes), part, right=True).sort(stable=True)
    coming = torch.searchsorted(by_rank, torch.arange(len(sizes), device=ids.device), right=True)
    return mine, _inverse(mine), leaving, arriving, _inverse(arriving), coming


def _inverse(order: Tensor) -> Tensor:
    count = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).index_put((order,), count)


def _routes_fake(
    ids: Tensor, places: Tensor, dim: int, sizes: Sequence[int], index: int, experts: Sequence[int]
) -> tuple[Tensor, ...]:
    mine = ids.new_empty([ids.numel() // max(1, ids.shape[dim]) * sizes[index]])
    ends = ids.new_empty([len(sizes)])
    alike = torch.empty_like
    return mine, alike(mine), ends, alike(places), alike(places), alike(ends)


routes = operator(
    "routes(Tensor ids, Tensor places, int dim, int[] sizes, int index, int[] experts)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _routes,
    _routes_fake,
)
"""places: of the rows of own experts, by expert, counted over all of `ids`. Of the rows of the own part by expert:
their places in it, the inverse, where those for each rank end. Of the rows of own experts by the rank that sends
them: their positions among `places`, the inverse, where those of each rank end. int64; ends: [ranks]."""


def _exchange_rows(a: Tensor, like: Tensor, sent: Tensor, received: Tensor, group_name: str) -> Tensor:
    both = torch.stack((received, sent))
    coming, leaving = both.diff(dim=1, prepend=both.new_zeros(2, 1)).tolist()
    rows = a.view(torch.uint8) if a.itemsize == 1 else a  # as what else is of one byte travels
    arrived = all_to_all(rows[: sum(leaving)].contiguous(), coming, leaving, group_name).view(a.dtype)
    missing = like.shape[0] - arrived.shape[0]
    if not missing:
        return arrived
    zeros = arrived.new_zeros(missing, *a.shape[1:])  # rows of no expert stay where they are
    return torch.cat([torch.ops._c10d_functional.wait_tensor(arrived), zeros])


exchange_rows = operator(
    "exchange_rows(Tensor a, Tensor like, Tensor sent, Tensor received, str group_name) -> Tensor",
    _exchange_rows,
    lambda a, like, *_: a.new_empty([like.shape[0], *a.shape[1:]]),
    "autoshard_rows_c10d_functional",  # by its end Inductor knows collectives
)
"""`a`: [n, *d], rows for the first rank first; `sent`, `received`: ends of what goes to and comes from each rank,
which the host reads. Result: [m, *d], of as many rows as `like`, for `_c10d_functional.wait_tensor`."""
