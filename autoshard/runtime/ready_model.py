"""What a model has to be before a call of it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.arguments import check_unwrapped
from autoshard.runtime.sharding import check_placed
from cost_model.errors import ShardingError
from passes.capture.places import Root, Via, contents, refill
from passes.capture.surroundings import held_by, module_attributes
from passes.ir.torch_dtensor import memory_of


def make_ready(model: nn.Module, mesh: DeviceMesh) -> None:
    """Its tensors are where this rank can have them, it is in no other wrapper, and only parameters are DTensors."""
    check_placed(model, mesh)
    check_unwrapped(model)
    _gather_state(model)


@torch.no_grad()
def _gather_state(model: nn.Module) -> None:
    """Buffers, and attributes and what they hold, that a script made of parallel parameters (`torch.ones_like(p)`,
    `p.detach().clone()`) become whole. On all ranks together. ShardingError for one in the memory of a parameter."""
    own = {memory_of(p): name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for where, table in list(_tables(model)):
        held = contents(table)
        pairs = list(held.items() if isinstance(held, dict) else enumerate(held))
        made = [key for key, value in pairs if _is_made(value)]
        for key in made:
            if (parameter := own.get(memory_of(held[key]))) is not None:
                raise ShardingError(
                    f"{where} {key!r} shares memory with parameter {parameter}, which it would no longer follow\n"
                    f"  try: .clone() of it, or read {parameter} in forward"
                )
            held[key] = held[key].full_tensor()
        if made:
            refill(table, held)


def _is_made(value: Any) -> bool:
    return isinstance(value, DTensor) and not isinstance(value, nn.Parameter) and not value.requires_grad


def _tables(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Containers of tensors that are no parameters, with words for an error."""
    for name, module in model.named_modules():
        yield f"{name or 'the model'}: buffer", module._buffers
        yield f"{name or 'the model'}: attribute", vars(module)
        for key, value in module_attributes(module).items():
            if isinstance(value, Tensor):
                continue
            for container in held_by(Via(Root(module, name), key, True), value):
                if isinstance(container.value, dict | list):
                    yield str(container.where), container.value
