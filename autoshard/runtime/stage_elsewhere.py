"""Results of ops on a rank whose stage does not hold the operands: empty, and on the operands' device.

torch makes them on the CPU, whatever the mesh. A gradient there does not fit its parameter on a GPU, and a copied model
would say that it is on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from passes.ir.torch_dtensor import dtensor_from, local_of

__all__ = ["result_elsewhere"]


def result_elsewhere(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, propagate: Callable[[], Any]
) -> Any:
    """What the op gives here; NotImplemented where torch's answer is as good. propagate: () -> torch's shardings."""
    operand = next((local_of(value) for value in args if isinstance(value, Tensor)), None)
    if mesh.get_coordinate() is not None or operand is None or op._schema.is_mutable:
        return NotImplemented
    asked = kwargs.get("device")
    device = operand.device if asked is None else torch.device(asked)
    if device.type == "cpu":
        return NotImplemented
    found = propagate()
    sharding = getattr(found, "output_spec", None)
    if isinstance(sharding, list | tuple):
        return [None if one is None else _empty(one, device) for one in sharding]
    return found if sharding is None else _empty(sharding, device)


def _empty(sharding: Any, device: torch.device) -> Tensor:
    """Of no elements; of no dims a zero, as torch has it."""
    meta = sharding.tensor_meta
    return dtensor_from(torch.zeros((0,)[: len(meta.shape)], dtype=meta.dtype, device=device), sharding)
