"""Move a rank's graph from the CPU, where all graphs are made, to the device that it runs on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.ir.torch_compat import fakes_on

__all__ = ["bind_device"]


def bind_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """`module`, in place, on `device`: the values of all nodes, and the device arguments of ops that make tensors.

        %m: f32[8] = aten.full([8], 1.0, device=cpu)       // "val" on the CPU
        ->
        %m: f32[8] = aten.full([8], 1.0, device=cuda:1)    // "val" on cuda:1

    Sizes, strides and dtypes stay. The new values are fakes of one mode, and require no gradient: autograd cannot
    follow fakes of a device that this torch cannot drive.

    Requires: every value is on the CPU; no op depends on where it runs.
    Ensures:  every value and every device argument is `device`; nothing changes if that is the CPU.
    """
    if device.type == "cpu":
        return module
    nodes = list(module.graph.nodes)
    moved = iter(fakes_on(device, [value for node in nodes for value in _values(node)]))
    for node in nodes:
        if "val" in node.meta:
            node.meta["val"] = _replaced(node.meta["val"], moved)
        if node.op == "call_function":
            node.args, node.kwargs = _on(device, node.args), _on(device, node.kwargs)
    module.recompile()
    return module


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _replaced(value: Any, moved: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(next(moved) if isinstance(item, torch.Tensor) else item for item in value)
    return next(moved) if isinstance(value, torch.Tensor) else value


def _on(device: torch.device, argument: Any) -> Any:
    """An argument, or a container of arguments, with every device replaced."""
    if isinstance(argument, torch.device):
        return device
    if isinstance(argument, (tuple, list)):
        return type(argument)(_on(device, item) for item in argument)
    if isinstance(argument, dict):
        return {name: _on(device, item) for name, item in argument.items()}
    return argument
