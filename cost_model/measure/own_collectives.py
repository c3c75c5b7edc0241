"""Collectives of CPU tensors in the way that is the quickest: through memory that the ranks share, where all are on one
host (`cost_model.measure.host_memory`); little data in one round of messages; and all else as torch has it, for
which these return None.

Plans run them (`passes.ops.collective_ops`), and profiles time them (`cost_model.measure.collective_work`). Every
rank of the group decides alike: by the group, and by what operands have in common on all ranks.

In one round every rank sends its data to every other rank at once, and waits. gloo's own collectives pass parts
around a ring, one round after the other. This is right for much data and slow for little: a round on 4 ranks that
share 2 cores takes about a millisecond, whatever it carries. 64 KiB take there with gloo's own and in one round: all-
reduce 7.2 and 2.9 ms, all-gather 5.0 and 2.5 ms.

Messages of one pair of ranks and tag arrive in order: ranks that start the same collectives in the same order agree
on which is which. All tensors are on the CPU; NCCL has such algorithms of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from cost_model.measure.host_memory import REDUCTIONS, HostMemory, host_memory_of, reduced_in_order

_TAG = 20_121
"""The tag of our  Users' own have torch's default, 0."""

_MOST_SENT = {"all_gather": 2**20, "reduce_scatter": 2**20, "all_reduce": 2**16}
"""Bytes that a rank may send in one round. An all-reduce sends n / 2 times as many as a ring does, the others as
many as a ring."""


Started = tuple[Tensor, list[Any]]
"""(result, works): the result is complete once every work has been waited for."""


def finished(started: Started) -> Tensor:
    """The result, once it is complete."""
    result, works = started
    for work in works:
        work.wait()
    return result


def in_one_round(kind: str, part: Tensor, ranks: int, op: str = "sum") -> bool:
    """Whether the collective runs in one round. The same on all ranks.

    part: what a rank sends to each other one (for all-gather and all-reduce, its operand). op: of a reduction.
    """
    small = (ranks - 1) * part.nbytes <= _MOST_SENT[kind]
    # Of gloo's ring only parts that hold something are sent: up to two elements that is quicker.
    if kind == "all_reduce" and part.numel() <= 2:
        return False
    return small and ranks > 2 and part.device.type == "cpu" and op in REDUCTIONS


def start_all_to_all(
    operand: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> Started:
    """Rows go only between ranks that have some for each other, such as the neighbours of a halo. gloo's own
    all-to-all sends to every rank, and waits for each.

    operand: [sum(sent), ...], contiguous. received, sent: rows of each rank of the group, which the two ends of a
    message must agree on. Returns [sum(received), ...].
    """
    result = operand.new_empty((sum(received), *operand.shape[1:]))
    into, out = result.split(list(received)), operand.split(list(sent))
    return result, _swap(out, into, group)


def start_all_gather(operand: Tensor, group: dist.ProcessGroup) -> Started:
    """operand: [a, ...], contiguous, on every rank. Returns [ranks * a, ...]."""
    ranks = group.size()
    result = operand.new_empty((ranks * operand.shape[0], *operand.shape[1:]))
    return result, _swap([operand] * ranks, result.view(ranks, *operand.shape).unbind(), group)


def all_reduce_in_one_round(operand: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """Waits. op: a key of `REDUCTIONS`. All ranks compute the same, in the order of ranks: equal bit by bit."""
    parts = finished(start_all_gather(operand.reshape(1, -1), group))
    return reduced_in_order(list(parts), op).view(operand.shape)


def reduce_scatter_in_one_round(operand: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """Waits. operand: [ranks * a, ...], contiguous. Returns [a, ...]: this rank's part, in the order of ranks."""
    ranks = group.size()
    rows = [operand.shape[0] // ranks] * ranks
    parts = finished(start_all_to_all(operand, rows, rows, group))
    return reduced_in_order(parts.split(rows), op)


def _swap(out: Sequence[Tensor], into: Sequence[Tensor], group: dist.ProcessGroup) -> list[Any]:
    """Send out[r] to rank r and receive into[r] from it; empty ones are not sent."""
    rank, works = group.rank(), list[Any]()
    if out[rank].numel():
        into[rank].copy_(out[rank])
    for peer in range(group.size()):
        # Peer by peer, sends first: this is a quarter faster than receiving from all first.
        if out[peer].numel() and peer != rank:
            works.append(group.send([out[peer]], peer, _TAG))
        if into[peer].numel() and peer != rank:
            works.append(group.recv([into[peer]], peer, _TAG))
    return works


SHARED = "autoshard: through shared memory"
"""The profiler's name of a collective that goes this way."""


def all_gather(operand: Tensor, group: dist.ProcessGroup) -> Started | None:
    """operand: [a, ...], contiguous. The result, [ranks * a, ...], may still be on its way."""
    shared = _shared(operand, group)
    if shared is not None:
        with record_function(SHARED):
            return shared.all_gather(operand), []
    if in_one_round("all_gather", operand, group.size()):
        return start_all_gather(operand, group)
    return None


def all_reduce(
    operand: Tensor, op: str, group: dist.ProcessGroup, into: Tensor | None = None
) -> Tensor | None:
    """The complete result, in `into` if that is given; it may be the operand."""
    shared = _shared(operand, group, op)
    if shared is not None:
        result = operand.new_empty(operand.shape) if into is None or not into.is_contiguous() else into
        with record_function(SHARED):
            shared.all_reduce(operand, op, result)
        return result if into is None or into is result else into.copy_(result)
    if in_one_round("all_reduce", operand, group.size(), op):
        result = all_reduce_in_one_round(operand, op, group)
        return result if into is None else into.copy_(result)
    return None


def reduce_scatter(operand: Tensor, op: str, group: dist.ProcessGroup) -> Tensor | None:
    """operand: [ranks * a, ...], contiguous. The complete result, [a, ...]."""
    shared = _shared(operand, group, op)
    if shared is not None:
        with record_function(SHARED):
            return shared.reduce_scatter(operand, op)
    part = operand[: operand.shape[0] // group.size()]
    if in_one_round("reduce_scatter", part, group.size(), op):
        return reduce_scatter_in_one_round(operand, op, group)
    return None


def _shared(operand: Tensor, group: dist.ProcessGroup, op: str = "sum") -> HostMemory | None:
    """None: not this way."""
    if operand.device.type != "cpu" or op not in REDUCTIONS or not operand.numel():
        return None
    return host_memory_of(group)
