"""An all-to-all as messages between those ranks that have something to tell each other.

Of halos those are a rank's neighbours. gloo's own all-to-all sends a message, if an empty one, to every rank of the
group, and waits for one of each, in a thread of its own. NCCL leaves empty ones out by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from passes.torch_compat import process_group_named, waited_for_with

__all__ = ["all_to_all"]

_TAG = 20_121
"""Of our messages, apart from 0, torch's default for users' own. Messages of one pair and tag arrive in order."""


def all_to_all(operand: Tensor, received: Sequence[int], sent: Sequence[int], group_name: str) -> Tensor:
    """What `_c10d_functional.all_to_all_single` does: to be waited for by `wait_tensor`.

    operand: [sum(sent), ...], contiguous. received, sent: rows of each rank of the group, which the two ends of a
    message must agree on.
    """
    if operand.device.type != "cpu":
        return torch.ops._c10d_functional.all_to_all_single(operand, list(received), list(sent), group_name)
    group = process_group_named(group_name)
    rank = group.rank()
    result = operand.new_empty((sum(received), *operand.shape[1:]))
    into, out = result.split(list(received)), operand.split(list(sent))
    if sent[rank]:
        into[rank].copy_(out[rank])
    works: list[Any] = []
    for peer in range(group.size()):
        # Peer by peer, sends first: on gloo a quarter faster than to receive from all first.
        if sent[peer] and peer != rank:
            works.append(group.send([out[peer]], peer, _TAG))
        if received[peer] and peer != rank:
            works.append(group.recv([into[peer]], peer, _TAG))
    return waited_for_with(result, works)
