"""Random numbers for what stages hold: those of one process, whichever ranks keep them.

torch draws on the ranks that have a part. Ranks of other stages would then be behind, and what several stages hold, or
all, would get other numbers on each.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.devices import local_device
from autoshard.runtime.process_groups import whole_group
from autoshard.runtime.sharding import like_parameter
from passes.ir.torch_dtensor import local_of

__all__ = ["RANDOM_OPS", "drawn"]

aten = torch.ops.aten

_IN_PLACE = (
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.random_.default,
)
RANDOM_OPS = (*_IN_PLACE, aten.rand_like.default, aten.randn_like.default, aten.bernoulli.default)
"""Each takes one tensor, whose shape is that of its numbers."""


def drawn(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pipeline: DeviceMesh) -> Any:
    """The op, one of `RANDOM_OPS`, of a DTensor: all ranks of the pipeline draw the whole, and keep their part.

    The numbers are those that rank 0's generator gives next. A rank whose generator stood where rank 0's does goes on
    as one process would; any other's stays where it is.
    """
    target, *rest = args
    whole = torch.empty(target.shape, dtype=target.dtype, device=local_device(pipeline))
    if op is aten.bernoulli.default:
        whole = target.full_tensor()
    with _generator_of_first(kwargs.get("generator"), pipeline):
        made = op(whole, *rest, **kwargs)
    part = like_parameter(made, target)
    if op not in _IN_PLACE:
        return part
    local_of(target).copy_(local_of(part))
    return target


@contextmanager
def _generator_of_first(given: torch.Generator | None, pipeline: DeviceMesh) -> Generator[None]:
    device = local_device(pipeline)
    generator = _default_generator(device) if given is None else given
    mine = generator.get_state()
    first = mine.to(device, copy=True)
    dist.broadcast(first, 0, group=whole_group(pipeline))
    first = first.to(mine.device)
    generator.set_state(first)
    try:
        yield
    finally:
        if not torch.equal(first, mine):
            generator.set_state(mine)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]
