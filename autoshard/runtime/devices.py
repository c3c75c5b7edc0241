"""Where a model's tensors are, and how they and a call's come to the mesh's device.

A model may be on the CPU, on the rank's own device, partly here and partly there, or on `meta`. What is on the CPU
moves when the plan is carried out; anything on a third device is an error before that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cost_model.errors import ShardingError


def local_device(mesh: DeviceMesh) -> torch.device:
    """Where this rank's shards live: the CPU, or the process's current device of the mesh's type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def check_placed(model: nn.Module, mesh: DeviceMesh) -> None:
    """`check_bound` and `check_devices` for this rank."""
    device = local_device(mesh)
    check_bound(device, bound_device())
    check_devices(model, device)


def check_devices(model: nn.Module, device: torch.device) -> None:
    """ShardingError, saying what is where, unless every parameter and buffer is on `device`, the CPU or `meta`."""
    places: dict[torch.device, list[str]] = {}
    for name, tensor in _state(model):
        places.setdefault(tensor.device, []).append(name)
    wrong = [place for place in places if place.type not in ("cpu", "meta") and place != device]
    if not wrong:
        return
    lines = [f"  {place}: {_some(names)}" for place, names in places.items()]
    remedy = (
        "model.cpu(), or a mesh of the model's device type"
        if device.type == "cpu"
        else f"torch.{device.type}.set_device(local rank) before the model is made, or model.to({str(device)!r})"
    )
    raise ShardingError(
        f"the model has tensors on {', '.join(map(str, wrong))}, and this rank's part of the mesh is {device}\n"
        + "\n".join(lines)
        + f"\n  try: {remedy}"
    )


def bound_device() -> torch.device | None:
    """The `device_id` that the default process group was made with, if any."""
    return getattr(dist.group.WORLD, "bound_device_id", None)


def check_bound(device: torch.device, bound: torch.device | None) -> None:
    """ShardingError if the process group was made for another device than the process's current one."""
    if bound is not None and bound.type == device.type and bound != device:
        raise ShardingError(
            f"the process group is bound to {bound}, and the process's current device is {device}\n"
            f"  try: torch.{device.type}.set_device({bound.index}) before init_process_group(device_id=...)"
        )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Every buffer and plain tensor attribute to `device`, those on `meta` excepted; one that several modules share
    stays one.

    As `model.to` does it, a moved buffer is a new tensor in the old one's place.
    """
    moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id stays its own
    for module in model.modules():
        for table in (module._buffers, vars(module)):
            for name, buffer in table.items():
                if type(buffer) is not Tensor and (buffer is None or table is not module._buffers):
                    continue
                if buffer.is_meta or buffer.requires_grad or buffer.device == device:
                    continue
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer, buffer.to(device)
                table[name] = moved[id(buffer)][1]


def arrived(tensor: Tensor, name: str, device: torch.device) -> Tensor:
    """A call's tensor on `device` (differentiable): a CPU tensor is copied there, without waiting for it.

    Raises ShardingError for a tensor on another device, whose values a copy would fetch from a device that
    is some other rank's.
    """
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and not isinstance(tensor, DTensor):
        return tensor.to(device, non_blocking=True)
    if tensor.is_meta:
        raise ShardingError(
            f"{name} is on meta, without values\n"
            f"  try: model.to_empty(device={device.type!r}) and then load_state_dict, or a tensor that has values"
        )
    raise ShardingError(
        f"{name} is on {tensor.device}, and this rank's part of the mesh is {device}\n"
        f"  try: {name}.to({str(device)!r}), or a CPU tensor, which autoshard moves"
    )


def seed_on(seed: Tensor, device: torch.device) -> Tensor:
    """A CPU seed on `device`, written there by a kernel with the number as its argument: a copy from pageable
    memory would make the host wait for the device in every step."""
    if device.type == "cpu":
        return seed
    return torch.full((), int(seed), dtype=torch.int64, device=device)


def _state(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _some(names: list[str]) -> str:
    shown = 4
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")
