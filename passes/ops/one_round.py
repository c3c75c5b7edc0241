"""Functional collectives on gloo as messages of one round (`cost_model.measure.timed_messages`).

As others they are waited for by `wait_tensor`. On other devices, and for much data, torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cost_model.measure import timed_messages as messages
from passes.ir.torch_compat import process_group_named, waited_for_with

__all__ = ["all_gather", "all_reduce", "all_reduce_", "all_to_all", "reduce_scatter"]

c10d = torch.ops._c10d_functional


def all_to_all(operand: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """What `all_to_all_single` does, whatever the size: empty messages are left out."""
    if operand.device.type != "cpu":
        return c10d.all_to_all_single(operand, list(received), list(sent), group_name)
    return waited_for_with(
        *messages.start_all_to_all(operand, received, sent, process_group_named(group_name))
    )


def all_gather(operand: Tensor, group_size: int, group_name: str) -> Tensor:
    """What `all_gather_into_tensor` does, without the op that crashes gloo when two are in flight.

    The functional op runs gloo's ALLGATHER_COALESCED. When a collective is done, gloo's two threads both
    assign its name to one std::string of the group (`lastCompletedWorkName`, torch 2.11 to 2.13), and that
    name alone is too long to be stored without a heap buffer, which both threads then free. The variant
    with an output runs the plain all-gather, on NCCL too.
    """
    if messages.in_one_round("all_gather", operand, group_size):
        return waited_for_with(*messages.start_all_gather(operand, process_group_named(group_name)))
    gathered = operand.new_empty((group_size * operand.shape[0], *operand.shape[1:]))
    return c10d.all_gather_into_tensor_out(operand, group_size, group_name, out=gathered)


def all_reduce(operand: Tensor, op: str, group_name: str) -> Tensor:
    """What `all_reduce` does; in one round it has been waited for."""
    group = process_group_named(group_name)
    if messages.in_one_round("all_reduce", operand, group.size(), op):
        return messages.all_reduce(operand, op, group)
    return c10d.all_reduce(operand, op, group_name)


def all_reduce_(operand: Tensor, op: str, group_name: str) -> Tensor:
    """The same in place."""
    group = process_group_named(group_name)
    if messages.in_one_round("all_reduce", operand, group.size(), op):
        return operand.copy_(messages.all_reduce(operand, op, group))
    return c10d.all_reduce_(operand, op, group_name)


def reduce_scatter(operand: Tensor, op: str, group_size: int, group_name: str) -> Tensor:
    """What `reduce_scatter_tensor` does; in one round it has been waited for."""
    part = operand[: operand.shape[0] // group_size]
    if messages.in_one_round("reduce_scatter", part, group_size, op):
        return messages.reduce_scatter(operand, op, process_group_named(group_name))
    return c10d.reduce_scatter_tensor(operand, op, group_size, group_name)
