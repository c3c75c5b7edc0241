"""Collectives of CPU tensors in the way that is the quickest: through memory that the ranks share, where all are on one
host; little data in one round of messages; and all else as torch has it, for which these return None.

Plans run them (`passes.ops.named_collective`), and profiles time them (`cost_model.measure.collective_work`). Every
rank of the group decides alike: by the group, and by what operands have in common on all ranks.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from cost_model.measure import timed_messages as messages
from cost_model.measure.host_groups import host_memory_of
from cost_model.measure.host_memory import REDUCTIONS, HostMemory
from cost_model.measure.timed_messages import Started

__all__ = ["SHARED", "all_gather", "all_reduce", "reduce_scatter"]

SHARED = "autoshard: through shared memory"
"""What a profiler calls a collective that goes this way."""


def all_gather(operand: Tensor, group: dist.ProcessGroup) -> Started | None:
    """operand: [a, ...], contiguous. The result, [ranks * a, ...], may still be on its way."""
    shared = _shared(operand, group)
    if shared is not None:
        with record_function(SHARED):
            return shared.all_gather(operand), []
    if messages.in_one_round("all_gather", operand, group.size()):
        return messages.start_all_gather(operand, group)
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
    if messages.in_one_round("all_reduce", operand, group.size(), op):
        result = messages.all_reduce(operand, op, group)
        return result if into is None else into.copy_(result)
    return None


def reduce_scatter(operand: Tensor, op: str, group: dist.ProcessGroup) -> Tensor | None:
    """operand: [ranks * a, ...], contiguous. The complete result, [a, ...]."""
    shared = _shared(operand, group, op)
    if shared is not None:
        with record_function(SHARED):
            return shared.reduce_scatter(operand, op)
    part = operand[: operand.shape[0] // group.size()]
    if messages.in_one_round("reduce_scatter", part, group.size(), op):
        return messages.reduce_scatter(operand, op, group)
    return None


def _shared(operand: Tensor, group: dist.ProcessGroup, op: str = "sum") -> HostMemory | None:
    """None: not this way."""
    if operand.device.type != "cpu" or op not in REDUCTIONS or not operand.numel():
        return None
    return host_memory_of(group)
