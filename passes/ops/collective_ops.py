"""Rows that go to the ranks of their experts, and back: collectives of as many rows as come.

    sent(whole, part, dims, sizes, parts, index, ways, count, group)  whole: gathered, of which own experts' rows count
    returned(part, whole, dims, sizes, parts, index, ways, group)     part: reduce-scattered, own experts' rows and 0
    routes(ids, places, dims, sizes, parts, index, experts, count)    who sends what to whom
    exchange_rows(a, like, sent, received, group)                     rows in the order of ranks, from each and to each
    add_rows(rows, places, like)                                      the sum of the rows of each place

The first two are their first operand: what a rank's graph says of a collective that moves more than is wanted. A
program, which has its own rows alone (`passes.lower.own_rows`), has the others in its place. dims: one or two that are
in parts; sizes: of the parts of the first, then of the second; parts: how many each has, the second's within one of
the first's. index: of this rank in the group; ways: ranks along each axis of the group; experts: how many each rank
has. count: rows of a token, which are alike where they are sent, and are added up before they return; a token travels
once to each rank. ids, of all rows of the group: int64, [*s], or [*tokens, count]; every rank of the group has the
same, so that no numbers are exchanged.

Functional collectives that carry the name of what they serve, so that a profiler can show it.

    %g: f32[64, 16] = _c10d_functional.all_gather_into_tensor(%w, 4, group)
    ->
    %g: f32[64, 16] = autoshard_c10d_functional.all_gather_into_tensor(%w, 4, group, "layers.0.w.weight")

The kernel runs the plain collective; while a profiler records, inside a range of that name. As the name
is an argument of the op, it survives every compiler. The result is waited for by
`_c10d_functional.wait_tensor`, as ever.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from cost_model.measure import own_collectives as own
from passes.ir.torch_compat import is_profiling, process_group_named, waited_for_with
from passes.ops.registration import operator

_first = lambda x, *_: x

sent, returned = (
    operator(
        f"{name}(Tensor a, Tensor b, int[] dims, int[] sizes, int[] parts, int index, int[] ways, {count}"
        "str group_name) -> Tensor",
        _first,
        _first,
    )
    for name, count in (("sent", "int count, "), ("returned", ""))
)
"""See the module."""


def own_spans(
    dims: Sequence[int], sizes: Sequence[int], parts: Sequence[int], index: int
) -> dict[int, tuple[int, int]]:
    """Of each dim in parts where this rank's part begins, and how long it is."""
    places = np.unravel_index(index, tuple(parts))
    cut = zip(dims, _by_dim(sizes, parts), places, strict=True)
    return {dim: (sum(own[: int(place)]), own[int(place)]) for dim, own, place in cut}


def _by_dim(sizes: Sequence[int], parts: Sequence[int]) -> list[list[int]]:
    """Sizes of the parts of each dim."""
    left = iter(sizes)
    return [list(itertools.islice(left, count)) for count in parts]


def _routes(
    ids: Tensor,
    places: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    parts: Sequence[int],
    index: int,
    experts: Sequence[int],
    count: int,
) -> tuple[Tensor, ...]:
    ends = lambda lengths: torch.tensor([*itertools.accumulate(lengths)], device=ids.device)
    ranks, tokens = math.prod(parts), ids.shape if count == 1 else ids.shape[:-1]
    owner = torch.searchsorted(ends(experts), ids, right=True).reshape(*tokens, count)
    own = owner
    for dim, (first, length) in own_spans(dims, sizes, parts, index).items():
        own = own.narrow(dim, first, length)
    own = own.reshape(-1, count)
    wanted = own.new_zeros(own.shape[0], ranks + 1, dtype=torch.bool).scatter_(1, own, True)[:, :ranks].t()
    numbers = torch.arange(own.shape[0], device=ids.device).repeat(ranks)
    most = own.shape[0] * min(ranks, count)
    place = torch.where(wanted.flatten(), wanted.flatten().cumsum(0) - 1, most)
    sent = own.new_zeros(most + 1).scatter_(0, place, numbers)[:most]
    mine = (owner == index).any(-1)
    holder, cut = ids.new_zeros(tokens), _by_dim(sizes, parts)
    for dim, lengths in zip(dims, cut, strict=True):
        part = torch.searchsorted(ends(lengths), torch.arange(tokens[dim], device=ids.device), right=True)
        holder = holder * len(lengths) + part.view(-1, *[1] * (len(tokens) - dim - 1))
    by_rank = holder.flatten().sort(stable=True)[1]
    before = torch.cat([by_rank.new_zeros(1), mine.flatten()[by_rank].cumsum(0)])
    slots = torch.empty_like(by_rank).index_put((by_rank,), before[:-1])[places // count]
    beside = math.prod(length for dim, length in enumerate(tokens) if dim not in dims)
    held = [beside * math.prod(lengths) for lengths in itertools.product(*cut)]
    return sent, wanted.sum(1).cumsum(0), slots, before[ends(held)]


def _routes_fake(
    ids: Tensor,
    places: Tensor,
    dims: Sequence[int],
    sizes: Sequence[int],
    parts: Sequence[int],
    index: int,
    experts: Sequence[int],
    count: int,
) -> tuple[Tensor, ...]:
    ranks, tokens = math.prod(parts), list(ids.shape if count == 1 else ids.shape[:-1])
    for dim, (_, length) in own_spans(dims, sizes, parts, index).items():
        tokens[dim] = length
    ends = ids.new_empty([ranks])
    return (
        ids.new_empty([math.prod(tokens) * min(ranks, count)]),
        ends,
        torch.empty_like(places),
        torch.empty_like(ends),
    )


routes = operator(
    "routes(Tensor ids, Tensor places, int[] dims, int[] sizes, int[] parts, int index, int[] experts, int count)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _routes,
    _routes_fake,
)
"""places: of the rows of own experts, counted over all of `ids`. Result: the tokens of the own part that are sent,
those for the first rank first, and where those for each rank end (what is behind the last end is no token); of the
rows at `places` their token's place among those that arrive, and where those of each rank end. int64; ends: [ranks]."""


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


def _add_rows(rows: Tensor, places: Tensor, like: Tensor) -> Tensor:
    dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    total = rows.new_zeros(like.shape[0], *rows.shape[1:], dtype=dtype)
    step = max(1, _AT_ONCE // max(1, math.prod(rows.shape[1:])))
    for some, where in zip(rows.split(step), places.split(step), strict=True):
        total.index_add_(0, where, some.to(dtype))
    return total.to(rows.dtype)


_AT_ONCE = 2**22
"""Elements that are cast at once: they stay in a cache."""


add_rows = operator(
    "add_rows(Tensor rows, Tensor places, Tensor like) -> Tensor",
    _add_rows,
    lambda rows, places, like: rows.new_empty([like.shape[0], *rows.shape[1:]]),
)
"""rows: [n, *d], added up in float32 at least; places: [n], below m. Result: of as many rows as `like`, m."""


c10d = torch.ops._c10d_functional


def all_to_all(operand: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """What `all_to_all_single` does, whatever the size: empty messages are left out."""
    if operand.device.type != "cpu":
        return c10d.all_to_all_single(operand, list(received), list(sent), group_name)
    return waited_for_with(*own.start_all_to_all(operand, received, sent, process_group_named(group_name)))


def all_gather(operand: Tensor, group_size: int, group_name: str) -> Tensor:
    """What `all_gather_into_tensor` does, without the op that crashes gloo when two are in flight.

    The functional op runs gloo's ALLGATHER_COALESCED. When a collective is done, gloo's two threads both
    assign its name to one std::string of the group (`lastCompletedWorkName`, torch 2.11 to 2.13), and that
    name alone is too long to be stored without a heap buffer, which both threads then free. The variant
    with an output runs the plain all-gather, on NCCL too.
    """
    started = own.all_gather(operand, process_group_named(group_name))
    if started is not None:
        return waited_for_with(*started)
    gathered = operand.new_empty((group_size * operand.shape[0], *operand.shape[1:]))
    return c10d.all_gather_into_tensor_out(operand, group_size, group_name, out=gathered)


def all_reduce(operand: Tensor, op: str, group_name: str) -> Tensor:
    """What `all_reduce` does; may have been waited for."""
    result = own.all_reduce(operand, op, process_group_named(group_name))
    return c10d.all_reduce(operand, op, group_name) if result is None else result


def all_reduce_(operand: Tensor, op: str, group_name: str) -> Tensor:
    """The same in place."""
    result = own.all_reduce(operand, op, process_group_named(group_name), into=operand)
    return c10d.all_reduce_(operand, op, group_name) if result is None else result


def reduce_scatter(operand: Tensor, op: str, group_size: int, group_name: str) -> Tensor:
    """What `reduce_scatter_tensor` does; may have been waited for."""
    result = own.reduce_scatter(operand, op, process_group_named(group_name))
    return c10d.reduce_scatter_tensor(operand, op, group_size, group_name) if result is None else result


# Inductor knows a collective's kernel by "_c10d_functional" in the op's name.
NAMESPACE = "autoshard_c10d_functional"

_RUN: Mapping[str, tuple[str, Callable[..., Tensor]]] = {
    "all_reduce": ("Tensor input, str reduce_op", all_reduce),
    "all_reduce_": ("Tensor(a!) input, str reduce_op", all_reduce_),
    "all_gather_into_tensor": ("Tensor input, int group_size", all_gather),
    "reduce_scatter_tensor": ("Tensor input, str reduce_op, int group_size", reduce_scatter),
    "all_to_all_single": (
        "Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes",
        all_to_all,
    ),
}
"""Name of a plain functional collective -> its arguments but for the group's name, and what runs instead of it."""


def _plain(name: str) -> Any:
    return getattr(torch.ops._c10d_functional, name).default


def _named(name: str, arguments: str, plain: Callable[..., Tensor]) -> Any:
    """The same op with one more argument, the name it serves."""
    label, result = name.removesuffix("_"), "Tensor(a!)" if name.endswith("_") else "Tensor"

    def run(operand: Tensor, *arguments: Any) -> Any:
        # Kernels for CPUs lay some results out otherwise than their fakes say (convolutions).
        *others, serves = arguments
        rest = (operand if name.endswith("_") else operand.contiguous(), *others)
        if not is_profiling():
            return plain(*rest)
        with record_function(f"{label}: {serves}"):
            return plain(*rest)

    schema = f"{name}({arguments}, str group_name, str serves) -> {result}"
    return operator(schema, run, lambda *arguments: _plain(name)(*arguments[:-1]), NAMESPACE)


_MADE = {name: _named(name, *of) for name, of in _RUN.items()}

NAMED_BY_NAME: Mapping[str, Any] = {name: op for name, op in _MADE.items() if name[-1] != "_"}
"""Name of a plain functional collective -> the same op with one more argument, the name it serves."""

NAMED: Mapping[Any, Any] = {_plain(name): op for name, op in NAMED_BY_NAME.items()}
"""The same by the plain op."""

ALL_REDUCE_IN_PLACE = _MADE["all_reduce_"]
