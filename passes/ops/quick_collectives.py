"""Functional collectives in the quickest way that CPU tensors have (`cost_model.measure.own_collectives`).

As others they are waited for by `wait_tensor`. On other devices, and where there is no quicker way, torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cost_model.measure import own_collectives as own
from passes.ir.torch_compat import process_group_named, waited_for_with

__all__ = ["all_gather", "all_reduce", "all_reduce_", "all_to_all", "reduce_scatter"]

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
